"""The protocol of benchmarks.peers, with two engines that run here, and the forms of a checkpoint that they load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import disturbance, write_gguf
from benchmarks.checkpoints import QWEN3_06B, QWEN3_MOE, write_checkpoint
from benchmarks.convert import as_it_is, num_bytes, safetensors, write_tokenizer
from benchmarks.peers import FORMATS, ONE_FILE_CASES, SHORT_CASES, Case, Engine, Format, known_cases, models, start
from benchmarks.write_gguf import converted, stacked, stored_tensors, widened

SMALL = QWEN3_MOE | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
DENSE = QWEN3_06B | {
    "vocab_size": 32000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "eos_token_id": 31999,
    "bos_token_id": 31998,
}
EIGHT = Case("8 sequences", 8, 16, 4)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """The plain checkpoint of a working directory."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", DENSE)
    write_tokenizer(checkpoint)
    return checkpoint


def started(model: Path, weights: str) -> Engine:
    """quire, after one run."""
    engine = start("quire", sys.executable, model, weights, 1, "auto")
    EIGHT.rate(engine, seed=0)
    engine.close()
    return engine


def test_the_gguf_file_is_the_checkpoint(dense: Path) -> None:
    """quire reads the file, vocabulary included, and chooses the tokens of the plain checkpoint."""
    file = dense.parent / "model-bf16.gguf"
    subprocess.run([sys.executable, write_gguf.__file__, str(dense), str(file)], check=True)
    of_file, of_checkpoint = started(file, "q4_0"), started(dense, "bf16")
    assert of_file.first_tokens == of_checkpoint.first_tokens
    assert num_bytes(file) == file.stat().st_size


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_quantised_checkpoint_loads_and_keeps_the_model(method: str, dense: Path) -> None:
    """The layers are a quarter of the size. Names of other tensors, and what config.json says, stay."""
    target = safetensors(method, 64)(dense, dense.parent)
    plain, quantized = (load_file(path / "model.safetensors") for path in (dense, target))
    layers = {name for name in plain if name.endswith("_proj.weight")}
    assert set(plain) - layers == {name for name in quantized if not name.split(".")[-2].endswith("_proj")}
    assert all(quantized[f"{name[:-6]}qweight"].nbytes * 4 == plain[name].nbytes for name in layers)
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == method
    assert config == json.loads((dense / "config.json").read_text())
    assert len(started(target, method).first_tokens[EIGHT.name, 1]) == EIGHT.batch


def test_engines_run_what_they_have_a_form_of(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those without a form, nor those that are not installed or not wanted."""
    for engine in ("vllm", "openvino", "llamacpp"):
        monkeypatch.setenv(f"QUIRE_PEER_{engine.upper()}", f"/{engine}/bin/python")
    monkeypatch.delenv("QUIRE_PEER_TRANSFORMERS", raising=False)
    format = Format(dict.fromkeys(("quire", "vllm", "transformers", "llamacpp"), as_it_is))
    found = models(dense.parent, format, "qwen3-0.6b", ["openvino", "vllm", "transformers"])
    assert found == {"quire": (sys.executable, dense), "vllm": ("/vllm/bin/python", dense)}
    only_llamacpp = models(dense.parent, format, "mamba2", ["vllm", "llamacpp"])
    assert set(only_llamacpp) == {"quire", "llamacpp"}


def test_a_form_that_nobody_can_write_names_what_is_missing(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_PEER_LLAMACPP", raising=False)
    with pytest.raises(SystemExit, match="QUIRE_PEER_LLAMACPP is not set"):
        models(dense.parent, FORMATS["q4_k_m"], "qwen3-0.6b", [])


def test_cases_belong_to_shapes_and_weights() -> None:
    assert known_cases("qwen3-0.6b", FORMATS["q4_0"]) == known_cases("qwen3-0.6b", FORMATS["gptq"]) == ONE_FILE_CASES
    assert known_cases("mamba2", FORMATS["bf16"]) == SHORT_CASES
    assert len(known_cases("qwen3-0.6b", FORMATS["int4"])) == 5


def test_engines_of_two_projects_choose_the_same_first_tokens(tmp_path: Path) -> None:
    """Two models of 32,000 tokens that differ would agree once in 32,000 prompts; bf16 logits may tie."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", SMALL)
    write_tokenizer(checkpoint)
    engines = [start(name, sys.executable, checkpoint, "bf16", 1, "auto") for name in ("quire", "transformers")]
    case = Case("8 sequences", 8, 16, 4)
    for engine in engines:
        case.rate(engine, seed=0)
        engine.close()
    assert engines[1].agreement(engines[0]) >= 0.75


def test_experts_are_stacked_in_their_order(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, SMALL) / "model.safetensors"
    whole = dict(stacked(stored_tensors(path), 4))["model.layers.1.mlp.experts.down_proj.weight"]
    names = [f"model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(4)]
    expected = torch.stack([load_file(path)[name] for name in names]).float()
    assert np.array_equal(widened(whole), expected.numpy())


def test_a_latents_projection_is_split_into_keys_and_values() -> None:
    """Scores and values from the halves are those of the whole: K = 3, V = 2, two heads, a latent of 4."""
    weight = torch.randn(2 * (3 + 2), 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    config = {"num_attention_heads": 2, "qk_nope_head_dim": 3}
    bits = weight.view(torch.uint16).numpy()
    (key_name, key), (value_name, value) = converted("model.layers.0.self_attn.kv_b_proj.weight", bits, config)
    assert [key_name.split(".")[-2], value_name.split(".")[-2]] == ["k_b_proj", "v_b_proj"]
    latent = torch.randn(4)
    heads = (weight.float() @ latent).view(2, 5)
    assert np.allclose(np.einsum("hrk,r->hk", widened(key), latent), heads[:, :3], atol=1e-6)
    assert np.allclose(np.einsum("hvr,r->hv", widened(value), latent), heads[:, 3:], atol=1e-6)


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, SMALL) / "model.safetensors"
    tensors = ((name, bits) for name, bits in stored_tensors(path) if ".experts.3." not in name)
    with pytest.raises(AssertionError, match="experts are missing"):
        dict(stacked(tensors, 4))


def test_time_of_others_is_told_from_that_of_a_process_and_its_children() -> None:
    """A child that computes is its parent's time, and an other's seen from elsewhere."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as parent:
        try:
            own, mine = disturbance.read(parent.pid), disturbance.read(os.getpid())
            deadline = time.monotonic() + 60
            while disturbance.read(parent.pid).own < own.own + 20 and time.monotonic() < deadline:
                time.sleep(0.05)
            now = disturbance.read(parent.pid)
            assert now.own >= own.own + 20
            without_it = disturbance.Reading(now.all, own.own)
            assert without_it.others_since(own, 1.0) > now.others_since(own, 1.0) >= 0
            assert disturbance.read(os.getpid()).own >= mine.own + 20  # the grandchild is this process's, too
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
