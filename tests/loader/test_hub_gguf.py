"""GGUF models of repositories of the hub: which file a tag means, and that nothing else is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import ModelNotFound
from quire.loader.gguf.repository import choose, models_in
from quire.loader.hub import means_gguf
from quire.loader.names import HubName, hub_name
from tests.checkpoints import make_checkpoint
from tests.gguf.files import GgufFile
from tests.loader.hub_server import Hub, serving
from tests.loader.test_hub import Machine

NAME = "someone/Tiny-GGUF"
SPLIT = [f"Q8_0/tiny-Q8_0-{part:05}-of-00002.gguf" for part in (1, 2)]
LISTED = {
    "m-Q4_K_M.gguf": 40 << 20,
    "m-UD-Q4_K_XL.gguf": 50 << 20,
    "m-IQ1_S.gguf": 10 << 20,
    "m.Q8_0.gguf": 80 << 20,
    "BF16/m-BF16-00001-of-00002.gguf": 90 << 20,
    "BF16/m-BF16-00002-of-00002.gguf": 90 << 20,
    "mmproj-m-F16.gguf": 5 << 20,
    "README.md": 1 << 20,
}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("org/name", HubName("org/name")),
        ("org/name:Q4_K_M", HubName("org/name", "Q4_K_M")),
        ("hf.co/org/name:q4_k_m", HubName("org/name", "q4_k_m")),
        ("https://huggingface.co/org/name", HubName("org/name")),
        ("qwen3:0.6b", HubName("Qwen/Qwen3-0.6B")),
        ("org/name:Q4_K_M:x", None),
        ("org/name:", None),
        ("org/name:../x y", None),
        ("name:Q4_K_M", None),
        ("a/b/c:Q4_K_M", None),
    ],
)
def test_names_of_the_hub(name: str, meant: HubName | None) -> None:
    assert hub_name(name) == meant


@pytest.mark.parametrize(
    ("tag", "first"),
    [
        (None, "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("q8_0", "m.Q8_0.gguf"),
        ("m.Q8_0.gguf", "m.Q8_0.gguf"),
        ("bf16", "BF16/m-BF16-00001-of-00002.gguf"),
    ],
)
def test_what_a_tag_means(tag: str | None, first: str) -> None:
    model, _ = choose(models_in(LISTED), tag, "org/m", 1000 << 20)
    assert model.files[0] == first
    assert model.num_bytes == sum(LISTED[file] for file in model.files)


def test_without_the_usual_tag_the_first_is_taken_that_is_read_and_fits() -> None:
    models = models_in({file: size for file, size in LISTED.items() if "Q4_K_M" not in file})
    model, reason = choose(models, None, "org/m", 100 << 20)
    assert (model.tag, len(models)) == ("UD-Q4_K_XL", 4), "BF16 has 180 MiB, IQ1_S is not read"
    assert "there is no Q4_K_M, and it is the first of 4 models" in reason
    with pytest.raises(
        ModelNotFound, match=r"none of its models .* There are IQ1_S \(10.0 MiB\), UD-Q4_K_XL \(50.0 MiB\)"
    ):
        choose(models, None, "org/m", 20 << 20)


@pytest.mark.parametrize(
    ("files", "tag", "message"),
    [
        (
            (),
            "Q5_K_M",
            r"no GGUF model 'Q5_K_M'.* There are IQ1_S \(10.0 MiB\), Q4_K_M \(40.0 MiB\), .*BF16 \(180.0 MiB\)",
        ),
        (("other-Q4_K_M.gguf",), "Q4_K_M", "means 2 models: m-Q4_K_M, other-Q4_K_M. Give the name of one as the tag"),
        (("n-Q6_K-00002-of-00003.gguf",), "Q6_K", "is split into 3 files, of which the repository lacks 2"),
    ],
)
def test_a_tag_that_means_none_or_several_is_refused(files: tuple[str, ...], tag: str, message: str) -> None:
    models = models_in({**LISTED, **dict.fromkeys(files, 1)})
    with pytest.raises(ModelNotFound, match=message):
        choose(models, tag, "org/m", 1000 << 20)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a repository holds: one model in one file, one in two, one that quire does not run, and more."""
    directory = tmp_path_factory.mktemp("gguf")
    source = make_checkpoint("llama", directory / "source")
    whole = GgufFile(source, kind="Q4_0").write(directory / "whole.gguf")
    (directory / "split").mkdir()
    GgufFile(source, kind="Q8_0").write(directory / "split" / "m.gguf", split_tensors=20)
    parts = sorted((directory / "split").iterdir())
    assert len(parts) == len(SPLIT)
    unknown = whole.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0rwkv6", 1)
    return {
        "tiny-Q4_K_M.gguf": whole.read_bytes(),
        "tiny-Q2_K.gguf": unknown,
        **{name: part.read_bytes() for name, part in zip(SPLIT, parts, strict=True)},
        "README.md": b"# Tiny",
        "config.json": b"{}",
    }


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[Hub]:
    with serving() as hub:
        hub.repositories[NAME] = dict(files)
        yield hub


def test_only_the_chosen_file_is_fetched_listed_and_deleted(tmp_path: Path, server: Hub) -> None:
    machine = Machine(tmp_path, server)
    assert machine.run("pull", NAME)[0] == 0
    assert server.fetched("tiny-Q4_K_M.gguf")[-1] == ""
    assert not [path for _, path, _ in server.requests if "resolve" in path and "Q4_K_M" not in path]
    assert machine.run("pull", f"hf.co/{NAME}:q8_0")[0] == 0
    assert [len(server.fetched(part.split("/")[1])) for part in SPLIT] == [2, 2]  # the header, then all
    server.requests.clear()
    status, out, err = machine.run("run", NAME, "hello", "-n", "4", "--dequantize")
    assert (status, out.count("\n")) == (0, 1), err
    assert server.requests == [], "what is here is used without the hub"
    rows = [json.loads(line) for line in machine.run("list", "--json")[1].splitlines()]
    assert {row["name"] for row in rows} == {f"{NAME}:Q4_K_M", f"{NAME}:Q8_0"}
    status, out, err = machine.run("rm", f"{NAME}:q4_k_m", "-y")
    assert (status, out.startswith(f"deleted {NAME}:Q4_K_M (")) == (0, True), err
    (row,) = [json.loads(line) for line in machine.run("list", "--json")[1].splitlines()]
    assert row["bytes"] == sum(len(server.repositories[NAME][part]) for part in SPLIT)
    status, _, err = machine.run("run", NAME, "hello", "-n", "1", "--dequantize", HF_HUB_OFFLINE="1")
    assert (status, f"{NAME}:Q8_0, the only one of its GGUF models on this machine" in err) == (0, True), err
    assert machine.run("rm", NAME, "-y")[0] == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 10_000]


@pytest.mark.parametrize("command", [["pull"], ["plan", "--memory", "8GiB"]])
def test_a_file_that_the_hub_does_not_give_is_named(command: list[str], tmp_path: Path, server: Hub) -> None:
    server.refused_files["tiny-Q4_K_M.gguf"] = 403
    status, _, err = Machine(tmp_path, server).run(command[0], NAME, *command[1:])
    assert (status, f"the file 'tiny-Q4_K_M.gguf' of the repository '{NAME}' could not be" in err) == (2, True), err
    assert "gated" not in err


def test_plan_and_show_fetch_headers_alone(tmp_path: Path, server: Hub) -> None:
    machine = Machine(tmp_path, server)
    status, out, err = machine.run("plan", f"{NAME}:Q8_0", "--json", "--memory", "8GiB", "--dequantize")
    assert (status, json.loads(out)["model"]) == (0, f"{NAME}:Q8_0"), err
    status, out, err = machine.run("show", NAME, "--dequantize")
    assert status == 0, err
    assert f"no; quire pull {NAME}" in out
    ranges = [span for method, path, span in server.requests if method == "GET" and path.endswith(".gguf")]
    assert ranges
    assert all(ranges), "each request is for a part of a file"


def test_what_quire_cannot_run_is_refused_before_it_is_fetched(tmp_path: Path, server: Hub) -> None:
    machine = Machine(tmp_path, server)
    status, _, err = machine.run("pull", f"{NAME}:Q2_K")
    assert (status, f"{NAME}/tiny-Q2_K.gguf: GGUF files of the architecture 'rwkv6' are not read" in err) == (2, True)
    status, _, err = machine.run("run", f"{NAME}:Q5_K_M", "hi")
    assert (status, "There are " in err, "Q8_0 (" in err) == (2, True, True), err
    assert "" not in server.fetched("tiny-Q2_K.gguf")


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("org/m", ("config.json", "m-Q8_0.gguf"), True),
        ("org/m", ("config.json", "model.safetensors", "m-Q8_0.gguf"), False),
        ("org/m:Q8_0", ("config.json", "model.safetensors", "m-Q8_0.gguf"), True),
        ("org/m", ("config.json", "pytorch_model.bin"), False),
    ],
)
def test_safetensors_are_meant_before_gguf_files(name: str, files: tuple[str, ...], expected: bool) -> None:
    model = hub_name(name)
    assert model is not None
    assert means_gguf(model, dict.fromkeys(files, 1)) is expected
