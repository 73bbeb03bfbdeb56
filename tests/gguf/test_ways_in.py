"""A GGUF file wherever a model can be named: it is a model with its tokenizer, its memory plan and its identity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.cli.main import main
from quire.engine.core_startup import create_config
from quire.errors import CheckpointError, ConfigError
from quire.loader.digest import WeightsDigest
from quire.loader.hub import resolve_model
from quire.loader.names import names_a_model
from quire.loader.weight_files import weight_files
from tests.checkpoints import make_checkpoint
from tests.engine.test_parity import available_ops
from tests.gguf.files import GgufFile

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("source") / "qwen3", hidden_size=128)


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a GGUF file, a checkpoint with the numbers that it stands for)."""
    directory, file = tmp_path_factory.mktemp("gguf"), GgufFile(source, kind="Q4_1")
    return file.write(directory / "model.gguf"), file.write_dequantized(directory / "dequantized")


def answer(model: Path, **options: Any) -> tuple[str, tuple[int, ...]]:
    with LLM(str(model), dtype="float32", max_model_len=128, **options) as llm:
        (output,) = llm.chat([{"role": "user", "content": "What is the weather?"}], GREEDY)
        return output.outputs[0].text, tuple(output.outputs[0].token_ids)


@pytest.mark.parametrize("options", [{"ops": "reference"}, {"ops": "cpu", "dequantize": True}])
def test_a_file_answers_as_the_checkpoint_that_it_stands_for(
    options: dict[str, Any], converted: tuple[Path, Path]
) -> None:
    if options["ops"] not in available_ops():
        pytest.skip("the native kernels are not built")
    file, dequantized = converted
    plain = {name: value for name, value in options.items() if name != "dequantize"}
    assert answer(file, **options) == answer(dequantized, **plain)


def test_a_directory_with_one_file_is_that_file(converted: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # as some repositories have beside their GGUF files
    (tmp_path / "model-Q4.gguf").write_bytes(converted[0].read_bytes())
    assert resolve_model(str(tmp_path)) == tmp_path / "model-Q4.gguf"
    assert resolve_model(str(tmp_path / "model-Q4.gguf")) == tmp_path / "model-Q4.gguf"
    (tmp_path / "model-Q8.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"2 GGUF models .* Give the file of one"):
        resolve_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_word_that_is_a_file_names_a_model(converted: tuple[Path, Path]) -> None:
    assert names_a_model(str(converted[0]))
    assert not names_a_model("what is model.gguf")


def test_the_digest_is_of_all_files(source: Path, tmp_path: Path) -> None:
    first = GgufFile(source, kind="Q8_0").write(tmp_path / "m.gguf", split_tensors=9)
    files = weight_files(first)
    assert len(files) > 2
    digests = set()
    for file in (None, files[0], files[-1]):
        if file is not None:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        with WeightsDigest(first, 1) as digest:
            digests.add(digest.result())
    assert len(digests) == 3


def test_the_plan_counts_the_bytes_of_the_formats(source: Path, tmp_path: Path) -> None:
    plans = {}
    for kind in ("Q4_0", "BF16"):
        file = GgufFile(source, kind=kind).write(tmp_path / f"{kind}.gguf")
        plans[kind] = create_config(EngineArgs(model=str(file), ops="cpu")).memory_plan["weights"]
    assert plans["Q4_0"] < 0.75 * plans["BF16"]


@pytest.mark.parametrize("command", ["plan", "show"])
def test_commands_take_a_file(command: str, converted: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(converted[0]), "--ops", "reference", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_run_answers_a_prompt(converted: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(converted[0]), "hello", "--max-tokens", "4", "--dequantize"]) == 0
    assert capfd.readouterr().out.strip()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"load_format": "safetensors"}, "load_format='safetensors', but .* is a GGUF file"),
        ({"model_impl": "transformers"}, "does not read GGUF files"),
        ({"quantization": "int8"}, "quantised already"),
        ({"quantization": "awq"}, "quantised by gguf"),
    ],
)
def test_options_for_other_formats_are_refused(
    options: dict[str, Any], expected: str, converted: tuple[Path, Path]
) -> None:
    with pytest.raises(ConfigError, match=expected):
        create_config(EngineArgs(model=str(converted[0]), **options))


def test_a_damaged_file_is_named_by_the_engine(converted: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(converted[0].read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"m\.gguf: .* is truncated at"):
        LLM(str(tmp_path / "m.gguf"))
