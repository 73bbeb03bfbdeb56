"""The activations that are planned are those for which a recorded step takes memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.config.memory.activations.step import activation_bytes
from quire.ops.backends import ops_of
from tests.engine.test_parity import available_ops
from tests.family_configs import RECURRENT
from tests.models.harness import Harness, arch_of

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="the native kernels are not built")
HYBRID = ("bamba", "falcon_h1", "lfm2_moe", "nemotron_h")
LATENT = ("deepseek_v2", "deepseek_v3", "minicpm3", "mistral4", "youtu")
INDEXED: dict[str, dict[str, int]] = {
    "as it is": {},
    "many index heads": {"index_n_heads": 40, "index_head_dim": 32},
    "many selected": {"index_topk": 200, "q_lora_rank": 8},
}
"""DeepSeek V3.2, with each part of an indexer the widest."""


@pytest.mark.parametrize("num_tokens", [1, 32, 61])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overrides", [{}, {"q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 48}])
@pytest.mark.parametrize("family", LATENT)
def test_a_step_takes_what_is_planned(
    checkpoint: Callable[..., Path], family: str, overrides: dict[str, int | None], dtype: str, num_tokens: int
) -> None:
    directory = checkpoint(family, **overrides)
    taken = recorded_bytes(Harness(ops_of("cpu"), directory, dtype=getattr(torch, dtype)), num_tokens)
    assert taken == activation_bytes(arch_of(directory), dtype, num_tokens, ops="cpu")


@pytest.mark.parametrize("num_tokens", [1, 32, 61])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", INDEXED)
def test_a_step_of_indexed_layers_takes_what_is_planned(
    checkpoint: Callable[..., Path], case: str, dtype: str, num_tokens: int
) -> None:
    directory = checkpoint("deepseek_v32", **INDEXED[case])
    taken = recorded_bytes(Harness(ops_of("cpu"), directory, dtype=getattr(torch, dtype)), num_tokens)
    assert taken == activation_bytes(arch_of(directory), dtype, num_tokens, ops="cpu")


@pytest.mark.parametrize("num_tokens", [1, 32, 61])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", RECURRENT)
def test_a_step_of_recurrent_layers_takes_what_is_planned(
    checkpoint: Callable[..., Path], family: str, dtype: str, num_tokens: int
) -> None:
    directory = checkpoint(family)
    arch = arch_of(directory)
    taken = recorded_bytes(Harness(ops_of("cpu"), directory, dtype=getattr(torch, dtype)), num_tokens)
    planned = activation_bytes(arch, dtype, num_tokens, ops="cpu")
    assert taken == planned


GATED = {
    "qwen3_next": {"head_dim": 64},
    "qwen3_5_text": {"num_attention_heads": 2, "linear_num_value_heads": 8, "linear_value_head_dim": 40},
    "qwen4_exp_text": {"head_dim": 64, "indexer_head_dim": 64, "indexer_budget": 400, "hc_lowrank": 90},
    "minimax": {"head_dim": 48},
    "recurrent_gemma": {"intermediate_size": 600},
    "jetmoe": {"kv_channels": 64},
    "afmoe": {"head_dim": 64},
    "gemma3n_text": {"intermediate_size": 300},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "attention_k_eq_v": True,
    },
    "gemma4_unified_text": {"global_head_dim": 64},
    "laguna": {"gating": "per-element"},
    "mimo_v2_flash": {"head_dim": 48},
    "longcat_flash": {"ffn_hidden_size": 300},
    "deepseek_v4": {"index_n_heads": 70, "hc_mult": 2},
    "axk2": {"gated_norm_rank": 300, "num_hidden_layers": 2},
    "glm_moe_dsa": {"num_hidden_layers": 5, "indexer_types": ["full", "shared", "shared", "full", "shared"]},
    "dots3_note_text": {"swa_num_attention_heads": 9, "swa_num_key_value_heads": 9},
    "hy_v4": {"n_shared_experts": 30, "hc_mult": 2},
    "diffllama": {"head_dim": 48},
    "beam": {"head_dim": 48},
    "doge": {"head_dim": 48},
    "dory": {"intermediate_size": 600},
    "modernbert-decoder": {"intermediate_size": 300},
    "zaya": {"head_dim": 24, "moe_intermediate_size": 300, "router_hidden_size": 90},
    "minimax_m3_vl_text": {"dense_intermediate_size": 300, "index_topk_blocks": 200},
}
"""Families with gates, recurrences or query heads of their own -> what makes another of their parts the widest."""


@pytest.mark.parametrize("num_tokens", [1, 61])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("family", GATED)
def test_a_step_of_gated_layers_takes_what_is_planned(
    checkpoint: Callable[..., Path], family: str, is_wide: bool, dtype: str, num_tokens: int
) -> None:
    directory = checkpoint(family, **(GATED[family] if is_wide else {}))
    taken = recorded_bytes(Harness(ops_of("cpu"), directory, dtype=getattr(torch, dtype)), num_tokens)
    assert taken == activation_bytes(arch_of(directory), dtype, num_tokens, ops="cpu")


@pytest.mark.parametrize("num_tokens", [1, 61])
@pytest.mark.parametrize("family", HYBRID)
def test_a_step_of_several_mixers_or_one_half_takes_what_is_planned(
    checkpoint: Callable[..., Path], family: str, num_tokens: int
) -> None:
    directory = checkpoint(family)
    taken = recorded_bytes(Harness(ops_of("cpu"), directory), num_tokens)
    assert taken == activation_bytes(arch_of(directory), "float32", num_tokens, ops="cpu")


def recorded_bytes(harness: Harness, num_tokens: int) -> int:
    """The furthest byte of the arena that a recording of a step takes."""
    from quire.ops.cpu.runtime.graphs import Graphs
    from quire.ops.cpu.runtime.memory import Arena

    class Measured(Arena):
        furthest = 0

        def _take(self, num_bytes: int) -> memoryview:
            piece = super()._take(num_bytes)
            self.furthest = max(self.furthest, *(end for end, _ in self._taken.values()))
            return piece

    graphs, arena = Graphs(), Measured()
    graphs._arena = arena
    inputs = harness.inputs([(harness.add([1] * num_tokens), num_tokens)])

    def run() -> tuple[Tensor, ...]:
        return (harness.model.forward(*inputs),)

    graphs.record(run)
    return arena.furthest
