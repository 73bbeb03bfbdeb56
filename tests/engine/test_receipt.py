"""Receipts: an answer given again is the same, and what is not the same engine is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.engine.core_startup import EMBEDDED_MODEL
from quire.engine.receipt import FORMAT, Receipt, first_difference
from quire.errors import InvalidParameter

PARAMS = SamplingParams(temperature=0.9, n=2, max_tokens=12, logit_bias={65: 1.5}, stop=["\n\n"])


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    with LLM(num_gpu_blocks_override=64, use_tqdm_on_load=False) as llm:
        outputs = llm.generate(["import os", "class Block"], PARAMS, use_tqdm=False)
        return llm.receipt(outputs, PARAMS)


def written(receipt: Receipt, directory: Path) -> str:
    file = directory / "receipt.json"
    file.write_text(receipt.to_json())
    return str(file)


def test_a_receipt_survives_its_file(receipt: Receipt) -> None:
    again = Receipt.from_json(receipt.to_json())
    assert again.identity == receipt.identity
    params = again.requests[0].params()
    assert params.seed is not None
    assert params.logit_bias == PARAMS.logit_bias
    assert first_difference(receipt.requests[0], again.requests[0]) is None


def test_a_receipt_shows_itself_in_a_line(receipt: Receipt) -> None:
    num_tokens = sum(len(completion.token_ids) for request in receipt.requests for completion in request.completions)
    version = receipt.identity.quire
    assert repr(receipt) == f"Receipt(quire={version!r}, model='quire-tiny', 2 requests, {num_tokens} tokens)"


def test_replay_says_identical(receipt: Receipt, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", written(receipt, tmp_path), "--num-gpu-blocks-override", "64"]) == 0
    assert capsys.readouterr().out.count(": identical (2 completions") == 2


def test_replay_shows_the_first_difference(
    receipt: Receipt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = Receipt.from_json(receipt.to_json())
    tokens = changed.requests[1].completions[1].token_ids
    before, tokens[3] = tokens[3], 7
    assert main(["replay", written(changed, tmp_path), "--num-gpu-blocks-override", "64"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "identical" in lines[0]
    assert f"completion 1, output token 3: 7, now {before}" in lines[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quire": "0.0.1"}, "Install quire 0.0.1"),
        ({"weights": "0" * 64}, "Give the model of the receipt"),
        ({"isa": "avx1024"}, "QUIRE_CPU_ISA=avx1024"),
        ({"kernels": "0" * 64}, "kernels: 000000000000, not "),
        ({"tokenizer": "0" * 64}, "Give the model of the receipt"),
    ],
)
def test_another_engine_is_refused_unless_forced(
    receipt: Receipt, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], message: str
) -> None:
    other = dataclasses.replace(receipt, identity=dataclasses.replace(receipt.identity, **change))
    file = written(other, tmp_path)
    assert main(["replay", file]) == 2
    assert message in capsys.readouterr().err
    if "isa" in change or "weights" in change:
        (name, value), *_ = change.items()
        assert main(["replay", file, "--force", "--num-gpu-blocks-override", "64"]) == 0
        captured = capsys.readouterr()
        assert f"warning: {name}: {value[:12]}, not" in captured.err
        assert "identical" in captured.out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        f'{{"format": {FORMAT + 1}}}',
        f'{{"receipt": {{"format": {FORMAT}}}}}',
        '{"format": [1]}',
        "\xff",
    ],
)
def test_what_is_no_receipt_is_refused(text: str) -> None:
    with pytest.raises(InvalidParameter, match="this is no receipt"):
        Receipt.from_json(text.encode("latin-1"))


@pytest.mark.parametrize("identity", ['{"quire": "0.0.9"}', "[]", "{}"])
def test_a_receipt_that_knows_only_samples_of_the_weights_is_refused_with_the_reason(identity: str) -> None:
    with pytest.raises(InvalidParameter, match=r"format 1.*reads 2.*samples of the weights.*the version that wrote it"):
        Receipt.from_json(f'{{"receipt": {{"format": 1, "identity": {identity}, "requests": []}}}}'.encode())


def test_a_model_in_a_directory_must_be_given(receipt: Receipt, tmp_path: Path) -> None:
    raw = json.loads(receipt.to_json())
    raw["identity"]["model"] = "my-model"
    (tmp_path / "reply.json").write_text(json.dumps({"choices": [], "receipt": raw}))
    assert main(["replay", str(tmp_path / "reply.json")]) == 2
    assert main(["replay", str(tmp_path / "missing.json")]) == 2


def copied_model(directory: Path) -> Path:
    """The embedded model under another name."""
    shutil.copytree(EMBEDDED_MODEL, directory)
    return directory


def test_weights_that_differ_in_one_bit_are_told_apart_and_names_do_not_count(
    receipt: Receipt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copied_model(tmp_path / "my-model")
    replay = ["replay", written(receipt, tmp_path), "--num-gpu-blocks-override", "64", "--model", str(model)]
    assert main(replay) == 0
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2 + 12345] ^= 1  # between what samples would look at
    file.write_bytes(data)
    assert main(replay) == 2
    assert "weights: " in capsys.readouterr().err


def test_what_differs_besides_the_weights_is_said_before_they_are_read(
    receipt: Receipt, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = copied_model(tmp_path / "my-model")
    (model / "model.safetensors").unlink()
    assert main(["replay", written(receipt, tmp_path), "--model", str(model), "--dtype", "float32"]) == 2
    assert "dtype: bfloat16, not float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data", ["[" * 200_000, '{"receipt":' * 5000, "\ud800", b"\xff", '{"receipt": {"format": 1e999}}']
)
def test_a_file_that_no_parser_gets_through_is_no_receipt(data: str | bytes) -> None:
    with pytest.raises(InvalidParameter, match="this is no receipt"):
        Receipt.from_json(data)
