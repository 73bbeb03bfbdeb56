"""The protocol of benchmarks.peers, with two engines that run here, and tensors on their way to GGUF."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.checkpoints import QWEN3_MOE, write_checkpoint
from benchmarks.convert import write_tokenizer
from benchmarks.peers import Case, start
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
