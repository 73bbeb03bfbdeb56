"""The texts that people meet first, word by word: a change here is one that somebody reads."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quire
from quire import EngineArgs
from quire.cli.main import main
from quire.cli.parser import COMMANDS, create_parser
from quire.server.app import NOT_BUILT
from tests.server.conftest import Running, engine_parts, loop, serve, server

__all__ = ["engine_parts", "loop", "serve", "server"]

TINY = Path(quire.__file__).parent / "tiny"
GOLDEN = {
    "run hi --quantization hqq": "quire run: argument --quantization: hqq is not supported: such checkpoints are not "
    "read. Give the original model, and int8 or int4 to round its weights while they are read. (quire "
    "run --help lists what there is)",
    "run hi --dtype fp8": "quire run: argument --dtype: fp8 is not supported: nothing is computed in 8-bit floats. Use "
    "bfloat16; --kv-cache-dtype fp8 where memory is short. (quire run --help lists what there is)",
    "run hi --load-format pt": "quire run: argument --load-format: pt is not supported: pickled weights are never "
    "opened. Convert the model to safetensors. (quire run --help lists what there is)",
    "serve -n 3": "quire serve: -n 3 is not supported yet: only 1 is; quire runs on one device and uses its cores "
    "(--num-threads). Here -n is vLLM's --nnodes. The length of an answer is set by --max-tokens (-n) of `quire run`, "
    "or by each request to a server. (quire serve --help lists what there is)",
    "run -ngl 9 hi": "quire run: -ngl is no flag; leave it out: quire computes on the CPU (quire run --help lists what "
    "there is)",
    "sevre": "quire: argument COMMAND: invalid command: 'sevre'; did you mean 'serve'? (choose from "
    f"{', '.join(COMMANDS)}) (quire --help lists what there is)",
    "run qwen3:7b hi": "quire: no short name 'qwen3:7b'; did you mean 'qwen3:1.7b'? Known: qwen3:0.6b, qwen3:1.7b, "
    "qwen3:14b, qwen3:32b, qwen3:4b, qwen3:8b.",
    "run LORA hi": "quire: LORA is a LoRA adapter (adapter_config.json), and quire does not apply adapters yet. Merge "
    "it into its base model (merge_and_unload() of the package peft), save that, and give the new directory.",
    "run GGUF hi": "quire: The GGUF model GGUF/model.gguf has 1 problem:\n  - model.gguf is no GGUF file: it does not "
    "begin with GGUF; copy it again",
}


@pytest.mark.parametrize("line", GOLDEN)
def test_refusals_read_like_this(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file in (("LORA", "adapter_config.json"), ("GGUF", "model.gguf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    try:
        status = main(line.split())
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capfd.readouterr()
    assert (status, out, err) == (2, "", f"{GOLDEN[line]}\n")


@pytest.mark.parametrize(("spelling", "dtype"), [("bf16", "bfloat16"), ("FP16", "float16"), ("fp32", "float32")])
def test_usual_spellings_of_a_dtype_are_taken(spelling: str, dtype: str) -> None:
    assert EngineArgs(dtype=spelling).dtype == dtype
    args = create_parser("run").parse_args(["run", "--dtype", spelling, "hi"])
    assert args.dtype == dtype


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = [action for action in create_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(commands.choices)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_defaults_as_people_write_them(command: str) -> None:
    text = " ".join(parsers()[command].format_help().split())
    for default in re.findall(r"\(default: ([^)]*)\)", text):
        assert not re.search(r"^[\[({'\"]|^(True|False|None)$", default), default
    for name, unit in (("timeout", "second"), ("window", "second"), ("interval", "second")):
        for action in parsers()[command]._actions:
            if any(flag.endswith(f"-{name}") for flag in action.option_strings) and action.help != argparse.SUPPRESS:
                assert unit in str(action.help).lower(), action.option_strings


@pytest.mark.parametrize("path", NOT_BUILT)
def test_routes_that_are_not_built_say_so(server: Running, path: str) -> None:
    reply = server.client.post(path, json={"input": "x"})
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == f"{path} is not built: {NOT_BUILT[path]}"
    assert server.client.post(f"{path}/x").json()["error"]["message"] == reply.json()["error"]["message"]


def test_a_route_that_nobody_knows_is_unknown(server: Running) -> None:
    message = server.client.post("/v1/embedding", json={}).json()["error"]["message"]
    assert message.startswith("Unknown route POST '/v1/embedding'")


def test_a_server_that_cannot_start_says_why_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = Path(shutil.copytree(TINY, tmp_path / "model"))
    data = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert main(["serve", str(directory), "--port", "0"]) == 2
    err = capfd.readouterr().err
    assert err.count("is truncated at") == 1
    assert "more like it" in err


@pytest.mark.parametrize("architecture", ["RwkvForCausalLM", "ReformerModelWithLMHead", "ProphetNetForCausalLM"])
def test_other_architectures_are_not_taken_for_a_slip(
    architecture: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], checkpoint: Callable[..., Path]
) -> None:
    directory = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    assert main(["run", str(directory), "hi"]) == 2
    err = capfd.readouterr().err
    assert f"the architecture {architecture!r} is not supported. " in err
    assert "did you mean" not in err
