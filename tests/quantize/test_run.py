"""Whole runs: what comes out computes what it should, a killed run goes on, and what cannot be is refused."""

from __future__ import annotations

import inspect
import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import CheckpointError, ConfigError
from quire.quantize import layerwise
from quire.quantize.layerwise import LayerwiseModel
from quire.quantize.tensor_file import read_tensors
from tests.checkpoints import in_transformers, one_thread
from tests.conftest import Checkpoint
from tests.quantize.runs import run

PROMPT = [11, 92, 45, 200, 7, 31, 150, 64]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    with one_thread():
        yield


def logprobs_of(directory: Path, **options: Any) -> torch.Tensor:
    """[V]: of the token after the prompt, by quire."""
    with LLM(str(directory), dtype="float32", max_logprobs=400, num_gpu_blocks_override=64, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=320, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
        (found,) = output.outputs[0].logprobs
    values = torch.full((320,), torch.nan)
    for token, logprob in found.items():
        values[token] = logprob.logprob
    return values


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in read_tensors(file).items()}


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "quantize_report.json"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"method": "gptq", "group_size": "32"}),
        ("llama", {"method": "awq", "group_size": "32", "symmetric": False, "num_key_value_heads": 4}),
        ("qwen2", {"method": "awq", "group_size": "32"}),
        ("gemma2", {"method": "awq", "group_size": "channel"}),
        ("phi", {"method": "gptq", "group_size": "32", "symmetric": False}),
        ("llama", {"format": "w8a8", "method": "gptq", "smoothing": 0.5}),
        ("llama", {"format": "fp8"}),
        ("llama", {"format": "int8", "group_size": "16"}),
        ("qwen3_moe", {"group_size": "8"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_result_computes_what_its_weights_stand_for(
    family: str, options: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """transformers computes with the numbers that quire wrote, quire reads the checkpoint; both give the same."""
    overrides = {"num_key_value_heads": options.pop("num_key_value_heads")} if "num_key_value_heads" in options else {}
    source = checkpoint(family, **overrides)
    out = tmp_path / "out"
    report = run(source, out, **options)
    assert report.num_quantized
    assert report.bytes_after < report.bytes_before
    original = in_transformers(source)
    with torch.no_grad():
        before = original(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    after = logprobs_of(out, dequantize=True)
    error = float((after - before).abs().max())
    assert 0 < error < (0.8 if options.get("format") else 3), "another model, or none that was rounded"
    if family != "qwen3_moe":
        expected = _with_numbers_of(out, source)
        torch.testing.assert_close(after, expected, rtol=2e-4, atol=2e-4)


def _with_numbers_of(out: Path, source: Path) -> torch.Tensor:
    """Log-probabilities of transformers' model with the weights of a checkpoint that quire wrote."""
    from tests.quantize.decompress import decompress

    model = type(in_transformers(source)).from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    missing, unexpected = model.load_state_dict(decompress(out), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        return model.eval()(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(method: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama")
    options = {"method": method, "group_size": "32", "measures": True}
    whole = run(source, tmp_path / "whole", **options)

    def die(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(source, out, **options, progress=die)
    assert not (out / "config.json").exists()
    (out / "model-00004-of-00004.safetensors.unfinished").write_bytes(b"half of a file")
    written = {file: file.stat().st_mtime_ns for file in out.glob("*.safetensors")}
    again = run(source, out, **options)
    assert len(written) == 3
    assert all(file.stat().st_mtime_ns == at for file, at in written.items()), "nothing is done twice"
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert again.perplexity == whole.perplexity


def test_a_run_that_was_killed_before_its_first_file_goes_on(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "quantize_recipe.json.unfinished").write_text("{")
    run(checkpoint("llama"), tmp_path, group_size="32")
    assert (tmp_path / "config.json").exists()
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("most_bytes", [500, 40_000])
def test_a_file_that_cannot_be_written_is_named_and_the_run_goes_on(
    most_bytes: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, limits = checkpoint("llama"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        with pytest.raises(OSError, match="cannot be written: File too large") as found:
            run(source, tmp_path, group_size="32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path(found.value.filename).parent == tmp_path
    assert not list(tmp_path.glob("*.unfinished"))
    run(source, tmp_path, group_size="32")
    assert (tmp_path / "config.json").exists()


def test_two_runs_do_not_write_to_one_directory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama")

    def start_another(done: int, total: int) -> None:
        with pytest.raises(ConfigError, match="another run writes to --out"):
            run(source, tmp_path, group_size="32")

    run(source, tmp_path, group_size="32", progress=start_another)
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda file: file.write_text("{}"), "changed while it was read"),
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()), "changed while it was read"),
        ("model.safetensors", lambda file: os.truncate(file, file.stat().st_size // 2), "ends within"),
    ],
)
def test_a_model_that_changes_meanwhile_is_noticed(
    file: str, change: Callable[[Path], object], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(checkpoint("llama"), source)

    with pytest.raises(CheckpointError, match=message):
        run(source, out, group_size="32", progress=lambda done, total: change(source / file))
    assert not (out / "config.json").exists()


def test_a_run_does_not_go_on_with_another_recipe(checkpoint: Checkpoint, tmp_path: Path) -> None:
    def die(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(checkpoint("llama"), tmp_path, group_size="32", progress=die)
    with pytest.raises(ConfigError, match="unfinished run with group_size 32, and this one has 16"):
        run(checkpoint("llama"), tmp_path, group_size="16")
    with pytest.raises(ConfigError, match="unfinished run with model"):
        run(checkpoint("llama", num_hidden_layers=2), tmp_path, group_size="32")
    run(checkpoint("llama"), tmp_path, group_size="32")
    with pytest.raises(ConfigError, match="holds a finished checkpoint; give an empty"):
        run(checkpoint("llama"), tmp_path, group_size="32")


def test_what_stays_is_what_was_there(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama")
    run(source, tmp_path, group_size="32", ignore=("*.0.mlp.down_proj", "*.q_proj"))
    before, after = tensors_of(source), tensors_of(tmp_path)
    same = {name for name in before if name in after}
    assert {name for name in before if name.endswith("norm.weight")} <= same
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight"} <= same
    assert sum(name.endswith("q_proj.weight") for name in same) == 3
    assert all(torch.equal(before[name], after[name]) for name in same)
    config = json.loads((tmp_path / "config.json").read_text())
    ignored = config.pop("quantization_config")["ignore"]
    assert ignored == [
        "lm_head",
        "model.embed_tokens",
        "model.layers.0.mlp.down_proj",
        *(f"model.layers.{i}.self_attn.q_proj" for i in range(3)),
    ]
    assert config == json.loads((source / "config.json").read_text())
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)


def test_routers_stay_whatever_they_are_called(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("hunyuan_v1_moe")
    run(source, tmp_path, format="int8", group_size="channel")
    before, after = tensors_of(source), tensors_of(tmp_path)
    routers = [name for name in before if name.endswith("gate.wg.weight")]
    assert len(routers) == 3
    assert all(torch.equal(before[name], after[name]) for name in routers)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("gemma3n_text", {}),
        ("opt", {"word_embed_proj_dim": 32}),
        ("biogpt", {}),
        ("gpt_neox", {}),
    ],
)
def test_readers_are_told_of_every_linear_layer_that_stays(
    family: str, overrides: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = checkpoint(family, **overrides)
    run(source, tmp_path, format="int8", group_size="channel")
    quantized = {name.removesuffix(".weight_packed") for name in tensors_of(tmp_path) if "_packed" in name}
    modules = in_transformers(source).named_modules()
    linear = {name for name, module in modules if isinstance(module, torch.nn.Linear)}
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert quantized < linear
    assert linear - quantized <= {*config["ignore"]}


def test_perplexity_is_that_of_transformers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("gemma2")
    model = LayerwiseModel(source, "model.layers")
    blocks = [list(range(at, at + 40)) for at in (3, 90)]
    hidden = model.start(blocks)
    for index in range(len(model.layers)):
        with model.widened(index):
            hidden = [model.run(index, states) for states in hidden]
    loss = 0.0
    with torch.no_grad():
        for block in blocks:
            tokens = torch.tensor([block])
            loss += float(in_transformers(source)(tokens, labels=tokens).loss) / len(blocks)
    assert model.perplexity(hidden, blocks) == pytest.approx(2.718281828459045**loss, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("mamba2", {}, "has recurrent layers"),
        ("gpt2", {}, r"stores weights \[in, out\]"),
        ("gpt_oss", {}, "the weights of all experts in one tensor"),
        ("granitemoe", {}, "input_linear.weight holds the weights of all experts in one tensor"),
        ("dbrx", {}, "experts.mlp.v1 holds the weights of all experts in one tensor"),
        ("llama", {"intermediate_size": 88}, "has 88 inputs, no multiple of the group size 32"),
    ],
)
def test_models_that_cannot_be_quantised_are_refused(
    family: str, overrides: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(checkpoint(family, **overrides), tmp_path / "out", group_size="32")
    assert not (tmp_path / "out").exists()


def test_quantised_models_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    run(checkpoint("llama"), tmp_path / "once", group_size="32")
    with pytest.raises(ConfigError, match="quantised already"):
        run(tmp_path / "once", tmp_path / "twice", group_size="32")


def test_calibration_of_experts_is_refused_before_anything_is_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"computed together.*use --method rtn --no-perplexity"):
        run(checkpoint("qwen3_moe"), tmp_path, method="gptq", group_size="8")
    assert not list(tmp_path.glob("*.safetensors"))


def test_texts_that_are_too_short_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("short " * 10)
    with pytest.raises(ConfigError, match="384 are the least"):
        run(checkpoint("llama"), tmp_path / "out", method="gptq", group_size="32", calibration=text)
    text.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="it is no UTF-8 text"):
        run(checkpoint("llama"), tmp_path / "out", method="gptq", group_size="32", calibration=text)


def test_patterns_that_match_nothing_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fc1 matches no linear layer; names are such as model"):
        run(checkpoint("llama"), tmp_path / "out", group_size="32", ignore=("*.fc1",))


def test_a_disk_that_is_too_small_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(ConfigError, match=r"has 0\.00 GB free"):
        run(checkpoint("llama"), tmp_path / "out", group_size="32")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "quire\[transformers\]"'):
        layerwise.require_transformers("calibration")


def test_the_command_prints_what_became_of_it(
    checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--group-size", "32", "--sequence-len", "48", "--calibration-blocks", "4"]
    assert main(["quantize", str(checkpoint("llama")), "--out", str(tmp_path / "out"), *flags]) == 0
    printed = capsys.readouterr().out
    assert "21 linear layers to int4 by gptq" in printed
    assert "that were not calibrated with" in printed
    report = json.loads((tmp_path / "out/quantize_report.json").read_text())
    assert f"perplexity {report['perplexity']['before']:.4f} -> {report['perplexity']['after']:.4f}" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "w8a8", "--method", "awq"], "--method awq is for int4 and int8"),
        (["--smoothing", "0.5"], "with --format w8a8 or fp8"),
        (["--format", "w8a8", "--smoothing", "1.5"], "a number between 0 and 1"),
        (["--sequence-len", "4"], "--sequence-len must be at least 8, got 4"),
        (["--calibration-blocks", "0"], "--calibration-blocks must be at least 1, got 0"),
        (["--method", "rtn", "--no-perplexity", "--calibration", "text"], "--calibration has no effect"),
        (["--method", "rtn", "--no-perplexity", "--sequence-len", "64"], "--sequence-len has no effect"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "quire-tiny", "--out", str(tmp_path / "out"), *flags]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_calibrated_methods_lose_less_than_rounding(tmp_path: Path) -> None:
    """int4 of the embedded model, on sources of Python's library: text such as it was trained on."""
    import argparse
    import calendar
    import csv
    import fractions

    text = tmp_path / "text"
    modules = (argparse, textwrap, csv, calendar, fractions, json.decoder, shutil)
    text.write_text("\n\n".join(map(inspect.getsource, modules)))
    loss = {}
    for method in ("rtn", "gptq", "awq"):
        options = {"group_size": "64", "calibration": text, "max_blocks": 64, "sequence_len": 256, "measures": True}
        perplexity = run("quire-tiny", tmp_path / method, method=method, **options).perplexity
        assert perplexity is not None
        loss[method] = perplexity.after / perplexity.before - 1
    assert loss["gptq"] < 0.6 * loss["rtn"], loss
    assert loss["awq"] < loss["rtn"], loss
    assert loss["rtn"] < 0.04, loss


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "options", [{}, {"symmetric": False}, {"format": "fp8"}, {"method": "awq"}], ids=["int4", "asym", "fp8", "awq"]
)
def test_weights_that_are_no_numbers_are_refused(
    number: float, options: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, name = tmp_path / "source", "model.layers.1.mlp.up_proj.weight"
    shutil.copytree(checkpoint("llama"), source)
    tensors = load_file(source / "model.safetensors")
    tensors[name][5, 7] = number
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    groups = {} if "format" in options else {"group_size": "32"}
    with pytest.raises(CheckpointError, match=f"{name} has numbers that are not finite"):
        run(source, tmp_path / "out", **groups, **options)


def test_names_in_config_json_do_not_depend_on_the_locale(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("llama"), source)
    config = {**json.loads((source / "config.json").read_text()), "made_by": "J\u00f6rg"}
    (source / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    command = [sys.executable, "-m", "quire", "quantize", str(source), "--out", str(tmp_path / "out")]
    flags = ["--method", "rtn", "--no-perplexity", "--group-size", "32"]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([*command, *flags], env=plain, check=True)
    assert json.loads((tmp_path / "out/config.json").read_text())["made_by"] == "J\u00f6rg"


def test_damaged_checkpoints_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("llama"), source)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        run(source, tmp_path / "out", group_size="32")
