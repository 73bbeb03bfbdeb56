"""resolve_model: directories, short names, repositories of a hub that the test serves, and what is none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.commands.run import RULE
from quire.config.families import ARCHITECTURES
from quire.config.memory.weights.formats import COMPACT_ISAS
from quire.errors import ConfigError, ModelNotFound
from quire.loader import hub
from quire.loader.names import is_repository, names_a_model, repository_of, short_name_of, short_names
from quire.platforms.current import current_capabilities
from tests.loader.hub_server import Hub, serving

TINY = Path(quire.__file__).parent / "tiny"
NAME = "someone/Tiny-1"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def server() -> Iterator[Hub]:
    with serving() as hub_:
        files = {name: (TINY / name).read_bytes() for name in FILES}
        junk = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle", "onnx/model.safetensors": b"no"}
        hub_.repositories[NAME] = {**files, **junk, "README.md": b"# Tiny", "consolidated.safetensors": b"no"}
        yield hub_


EACH = """
import json, sys
from quire.cli.main import main
for argv in json.loads(sys.argv[1]):
    print(main(argv), end="\\0", file=sys.stderr)
"""


class Machine:
    """A machine with a cache of its own, which runs quire in processes: the library reads its settings once."""

    def __init__(self, home: Path, server: Hub) -> None:
        self.home = home
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "QUIRE_"))},
            "HF_HOME": str(home),
            "HF_ENDPOINT": server.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "COLUMNS": "200",
        }

    def run(self, *argv: str, stdin: str = "", **env: str) -> tuple[int, str, str]:
        return self._python("-m", "quire.cli.main", *argv, stdin=stdin, **env)

    def run_each(self, *commands: list[str]) -> list[tuple[int, str]]:
        """(status, standard error) of commands that one process runs in turn: transformers is imported once."""
        status, _, err = self._python("-c", EACH, json.dumps(commands))
        found = [said.rpartition("\n") for said in err.split("\0")[:-1]]
        assert (status, len(found)) == (0, len(commands))
        return [(int(status), said) for said, _, status in found]

    def _python(self, *argv: str, stdin: str = "", **env: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *argv],
            env={**self.env, **env},
            cwd=self.home,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def machine(tmp_path: Path, server: Hub) -> Machine:
    return Machine(tmp_path, server)


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["no/such/directory", "./nothing", "nothing", "org/", "/absent", "a b/c", "../x"])
def test_what_is_neither_directory_nor_repository_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelNotFound, match="no directory"):
        hub.resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelNotFound, match="is a file"):
        hub.resolve_model(str(file))


@pytest.mark.parametrize(
    ("file", "parts"),
    [
        ("adapter_config.json", ["LoRA adapter", "merge_and_unload"]),
        ("pytorch_model.bin", ["pickled weights", "safetensors"]),
    ],
)
def test_other_formats_are_recognised(file: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(ConfigError) as caught:
        hub.resolve_model(str(tmp_path))
    assert all(part in caught.value.message for part in parts)


def test_short_names_stand_for_repositories() -> None:
    assert repository_of("qwen3:0.6b") == repository_of("Qwen3:0.6B") == "Qwen/Qwen3-0.6B"
    assert short_name_of("Qwen/Qwen3-0.6B") == "qwen3:0.6b"
    assert repository_of("someone/else") == "someone/else"
    assert {name for name in short_names() if ":" not in name} == {name.partition(":")[0] for name in short_names()}
    assert all(is_repository(repository) for repository in short_names().values())
    assert ARCHITECTURES


def test_models_for_text_and_images_are_refused_before_their_weights_are_fetched(tmp_path: Path) -> None:
    config = {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "text_config": {"model_type": "gemma", "hidden_size": 2560},
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"text and images.*checkpoint of the family \(GemmaForCausalLM\)"):
        hub.check_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    "word",
    [
        "qwen3:0.6b",
        "QWEN3",
        "qwen3:9b",
        "org/name",
        "org/name:Q4_K_M",
        "hf.co/org/name:q8_0",
        "./x",
        "../x",
        "/x",
        "~/x",
        ".",
        "",
    ],
)
def test_words_that_name_a_model(word: str) -> None:
    assert names_a_model(word) is bool(word)


@pytest.mark.parametrize(
    "word", ["import os", "hello", "a b/c", "x:y", "a/b/c", "def f(x):", "qwen3: is it", "1/", "x" * 9999]
)
def test_words_that_are_prompts(word: str) -> None:
    assert not names_a_model(word)
    assert "org/name" in RULE


def test_a_repository_is_fetched_without_code_and_then_used_offline(machine: Machine, server: Hub) -> None:
    status, out, err = machine.run("pull", NAME)
    assert status == 0, err
    assert {path.name for path in Path(out.strip()).iterdir()} == set(FILES)
    assert not [path for _, path, _ in server.requests if path.endswith((".py", ".bin", "consolidated.safetensors"))]
    server.requests.clear()
    ask = ("run", NAME, "import os", "--raw", "-n", "4", "--temperature", "0")
    status, out, err = machine.run(*ask, HF_HUB_OFFLINE="1")
    assert (status, err) == (0, f"model: {NAME}; continuing the text\n")
    assert out.startswith("import os")
    assert machine.run(*ask)[1] == out
    assert server.requests == []


def test_models_are_listed_shown_and_deleted(machine: Machine) -> None:
    assert machine.run("pull", NAME)[0] == 0
    status, out, _ = machine.run("list")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "quire-tiny", NAME]
    assert "MiB" in out.splitlines()[2]
    (row,) = [json.loads(line) for line in machine.run("list", "--json")[1].splitlines()]
    assert (row["name"], row["problem"]) == (NAME, None)
    assert row["bytes"] >= (TINY / "model.safetensors").stat().st_size
    report: dict[str, Any] = json.loads(machine.run("show", NAME, "--json")[1])
    assert report["architecture"] == "LlamaForCausalLM"
    is_compact = current_capabilities().ops_isa in COMPACT_ISAS
    assert report["memory plan"]["weights"] == ("10.3 MiB" if is_compact else "13.5 MiB")
    status, out, err = machine.run("rm", NAME)
    assert (status, out) == (2, "")
    assert "add -y" in err
    status, out, err = machine.run("rm", NAME, "-y")
    assert (status, out.startswith(f"deleted {NAME}")) == (0, True), err
    assert NAME not in machine.run("list", "-a")[1]
    status, _, err = machine.run("rm", NAME, "-y")
    assert (status, "is not on this machine" in err) == (2, True)


def test_show_fetches_no_weights(machine: Machine, server: Hub) -> None:
    status, out, err = machine.run("show", NAME)
    assert status == 0, err
    assert f"no; quire pull {NAME}" in out
    assert [path for method, path, _ in server.requests if method == "GET"] == [
        f"/{NAME}/resolve/main/config.json"
    ] or (server.fetched("config.json") and not server.fetched("model.safetensors"))


def test_a_plan_fetches_config_json_alone(machine: Machine, server: Hub) -> None:
    status, out, err = machine.run("plan", NAME, "--json", "--memory", "8GiB")
    assert status == 0, err
    plan = json.loads(out)
    assert (plan["model"], plan["fits"]) == (NAME, True)
    assert server.fetched("config.json")
    fetched = {path for method, path, _ in server.requests if method == "GET"}
    assert not [path for path in fetched if path.endswith((".safetensors", "tokenizer.json"))]
    here = json.loads(machine.run("plan", str(TINY), "--json", "--memory", "8GiB", HF_HUB_OFFLINE="1")[1])
    assert {name for name in plan if plan[name] != here[name]} <= {"model", "choices"}


def test_a_plan_for_a_model_that_quire_does_not_run_says_so(machine: Machine, server: Hub) -> None:
    server.repositories[NAME]["config.json"] = json.dumps({"architectures": ["T5Model"], "model_type": "t5"}).encode()
    status, out, err = machine.run("plan", NAME)
    assert (status, out) == (2, "")
    assert "T5Model" in err


def test_an_interrupted_download_goes_on(machine: Machine, server: Hub) -> None:
    server.cut_after["model.safetensors"] = 12 << 20
    status, _, err = machine.run("pull", NAME)
    assert status == 2
    assert f"quire pull {NAME}` continues" in err
    assert "not complete" in machine.run("list", "-a")[1]
    assert NAME not in machine.run("list")[1]
    status, _, err = machine.run("run", NAME, "hi", HF_HUB_OFFLINE="1")
    assert (status, "not complete on this machine" in err) == (2, True)
    server.is_down = False
    assert machine.run("pull", NAME)[0] == 0
    assert server.fetched("model.safetensors")[-1] == f"bytes={10 << 20}-"  # written in pieces of 10 MiB
    assert machine.run("run", NAME, "import os", "-n", "2", HF_HUB_OFFLINE="1")[0] == 0


def test_a_model_without_its_tokenizer_is_not_listed_as_complete(machine: Machine) -> None:
    assert machine.run("pull", NAME)[0] == 0
    assert "not complete" not in machine.run("list", "-a")[1]
    (snapshot,) = machine.home.glob("hub/models--*/snapshots/*")
    (snapshot / "tokenizer.json").unlink()
    assert "not complete" in machine.run("list", "-a")[1]
    assert machine.run("run", NAME, "hi", HF_HUB_OFFLINE="1")[0] == 2
    assert machine.run("pull", NAME)[0] == 0
    assert "not complete" not in machine.run("list", "-a")[1]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_files_that_come_damaged_are_not_kept(file: str, machine: Machine, server: Hub) -> None:
    server.damaged.add(file)
    status, _, err = machine.run("pull", NAME)
    assert (status, f"{file} came damaged" in err) == (2, True), err
    server.damaged.clear()
    assert machine.run("pull", NAME)[0] == 0
    assert server.fetched(file) == ["", ""]


def test_files_that_were_damaged_in_the_cache_are_fetched_again(machine: Machine, server: Hub) -> None:
    assert machine.run("pull", NAME)[0] == 0
    (snapshot,) = machine.home.glob("hub/models--*/snapshots/*")
    for name in ("model.safetensors", "tokenizer.json"):
        with (snapshot / name).open("r+b") as file:
            file.truncate(1000)
    config = snapshot / "config.json"
    config.write_bytes(b"[" + config.read_bytes()[1:])
    assert machine.run("run", NAME, "import os", "-n", "2")[0] == 2
    assert machine.run("pull", NAME)[0] == 0
    assert machine.run("run", NAME, "import os", "-n", "2", HF_HUB_OFFLINE="1")[0] == 0
    assert [len(server.fetched(name)) for name in FILES] == [2, 1, 2, 1, 2]


def test_a_cache_that_cannot_be_written_is_named(machine: Machine) -> None:
    status, _, err = machine.run("pull", NAME, HF_HOME="/proc/cache")
    assert (status, "could not be stored: /proc/cache: No such file or directory. Set HF_HOME" in err) == (2, True), err


@pytest.mark.parametrize(
    ("status", "code", "parts"),
    [
        (401, "GatedRepo", ["is gated", f"https://huggingface.co/{NAME}", "HF_TOKEN"]),
        (403, "GatedRepo", ["is gated", "HF_TOKEN"]),
        (401, "", ["is not on the hub, or is private", "HF_TOKEN"]),
        (404, "RepoNotFound", ["is not on the hub, or is private"]),
        (429, "", ["answers no more requests", "Wait", "HF_TOKEN"]),
        (503, "", ["could not be fetched", "503"]),
    ],
)
def test_a_repository_that_is_refused_says_why(
    status: int, code: str, parts: list[str], machine: Machine, server: Hub
) -> None:
    server.refusals[NAME] = (status, code)
    exit_status, out, err = machine.run("pull", NAME)
    assert (exit_status, out) == (2, "")
    for part in parts:
        assert part in err
    assert err.count("quire: ") == 1


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize(("status", "why"), [(403, "access to it is denied"), (404, "does not have it")])
def test_a_single_file_that_is_refused_is_not_the_repositorys_fault(
    name: str, status: int, why: str, machine: Machine, server: Hub
) -> None:
    server.refused_files[name] = status
    exit_status, out, err = machine.run("pull", NAME)
    assert (exit_status, out) == (2, "")
    assert f"the file '{name}' of the repository '{NAME}' could not be fetched" in err
    assert f"{why}" in err
    assert f"({status})" in err
    assert "gated" not in err
    del server.refused_files[name]
    assert machine.run("pull", NAME)[0] == 0
    assert server.fetched("config.json") == [""]


def test_a_token_is_sent(machine: Machine, server: Hub) -> None:
    assert machine.run("pull", NAME, HF_TOKEN="hf_secret")[0] == 0
    assert set(server.tokens) == {"Bearer hf_secret"}


def test_a_revision_that_is_not_there_is_named(machine: Machine) -> None:
    status, _, err = machine.run("pull", NAME, "--revision", "v9")
    assert (status, "has no revision 'v9'" in err) == (2, True)


@pytest.mark.parametrize("env", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_without_a_network_the_remedy_is_named(env: dict[str, str], machine: Machine) -> None:
    status, _, err = machine.run("run", NAME, "hi", **env)
    assert status == 2
    assert ("cannot be reached" if "HF_ENDPOINT" in env else "HF_HUB_OFFLINE=1 forbids") in err
    assert "Retrying" not in err, "what cannot be reached is not tried for half a minute"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, ["'RwkvForCausalLM' is not supported."]),
        ({"architectures": None, "model_type": "rwkv"}, ["'rwkv' is not supported."]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantised by 'hqq'", "the original"]),
    ],
)
def test_what_quire_cannot_run_is_refused_before_its_weights_are_fetched(
    changes: dict[str, Any], parts: list[str], machine: Machine, server: Hub
) -> None:
    config = {**json.loads((TINY / "config.json").read_text()), **changes}
    server.repositories[NAME]["config.json"] = json.dumps(config).encode()
    for status, err in machine.run_each(["pull", NAME], ["run", NAME, "hi"], ["show", NAME]):
        assert status == 2
        for part in parts:
            assert part in err
        assert "did you mean" not in err
    assert server.fetched("model.safetensors") == []


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("model.Q4_K_M.gguf", "no GGUF file: it does not begin with GGUF"),
        ("adapter_config.json", "LoRA adapter"),
        ("README.md", "has no config.json"),
    ],
)
def test_repositories_of_other_things_are_recognised(file: str, part: str, machine: Machine, server: Hub) -> None:
    server.repositories[NAME] = {file: b"{}"}
    status, _, err = machine.run("pull", NAME)
    assert (status, part in err) == (2, True), err


def test_weights_in_pickles_only_are_refused(machine: Machine, server: Hub) -> None:
    del server.repositories[NAME]["model.safetensors"]
    status, _, err = machine.run("pull", NAME)
    assert (status, "no complete set of *.safetensors" in err) == (2, True), err


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"quire\[hub\]"):
        hub.resolve_model("org/name")
