"""What follows from the sizes of recurrent layers: pages, blocks, the memory plan, messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from quire.config.arch import LayerSpec, ModelArch
from quire.config.memory.plan import MemoryUse, plan_memory
from quire.config.memory.weights.shapes import context_per_token, num_parameters
from quire.messages.codec import Codec, FrameReader
from quire.messages.kv import PageSpec, StatePage, StateSpec

MAMBA_2_7B: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "vocab_size": 50_288,
    "num_heads": 80,
    "head_dim": 64,
    "n_groups": 1,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, float("inf")],
}
BAMBA_9B: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_state": 128,
}


def arch_of(config: dict[str, Any]) -> ModelArch:
    return ModelArch.from_config(config, source="config.json")


def test_a_model_without_attention_has_a_page_of_states() -> None:
    arch = arch_of(MAMBA_2_7B)
    layout = arch.kv_layout(16, "bfloat16", ops="cpu")
    numbers = 80 * 64 * 128 + 3 * (80 * 64 + 2 * 128)
    (group,) = layout.groups
    assert isinstance(group.spec, StateSpec)
    assert group.spec.page.num_elements == numbers
    assert 4 * numbers <= group.spec.page.num_bytes < 4 * numbers + 128
    assert layout.block_bytes == 64 * group.spec.page.num_bytes
    assert [layout.most_blocks(length, 512) for length in (0, 1, 2, 100_000)] == [0, 1, 2, 2]
    assert layout.num_entries(100_000) == 2
    assert (arch.num_heads, arch.num_kv_heads, arch.head_size) == (0, 0, 0)
    assert context_per_token(arch) == float("inf")
    assert round(num_parameters(arch) / 1e9, 1) == 2.7


@pytest.mark.parametrize(("dtype", "block_size"), [("bfloat16", 1056), ("float32", 528), ("int8", 2048)])
def test_blocks_beside_states_have_as_many_tokens_as_fill_their_bytes(dtype: str, block_size: int) -> None:
    layout = arch_of(BAMBA_9B).kv_layout(16, dtype, ops="cpu")
    assert layout.block_size == block_size
    assert [len(group.layers) for group in layout.groups] == [3, 5, 5, 5, 5, 5, 4]
    assert layout.state_groups == tuple(range(1, 7))
    (attention,) = {group.spec.page for group in layout.groups[:1]}
    (state,) = {group.spec.page for group in layout.groups[1:]}
    assert isinstance(attention, PageSpec)
    assert isinstance(state, StatePage)
    assert attention.num_bytes == state.num_bytes
    before = PageSpec(num_kv_heads=8, head_size=128, dtype=dtype, block_size=block_size - 16, slot_multiple=16)
    assert before.num_bytes < 4 * state.num_elements <= state.num_bytes
    assert layout.most_blocks(10_000, 512) == -(-10_000 // block_size) + 2 * 6


def test_the_plan_counts_pages_and_what_a_scan_works_with() -> None:
    arch = arch_of(MAMBA_2_7B)
    use = MemoryUse(
        dtype="bfloat16",
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=32_768,
        max_logprobs=5,
        block_size=16,
        kv_cache_dtype="bfloat16",
    )
    few, more = plan_memory(arch, use, 2), plan_memory(arch, use, 16)
    assert more.kv_cache == 8 * few.kv_cache == 16 * arch.kv_layout(16, "bfloat16", ops="cpu").block_bytes
    assert few.workspace > 4 * 4 * 80 * 64 * 128


@dataclass(frozen=True, slots=True)
class Told:
    layers: tuple[LayerSpec, ...]


@pytest.mark.parametrize(
    "config",
    [
        MAMBA_2_7B,
        BAMBA_9B,
        {**BAMBA_9B, "model_type": "jamba", "architectures": ["JambaForCausalLM"]},
        {**BAMBA_9B, "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "full_attn_idxs": [2]},
        {**MAMBA_2_7B, "model_type": "mamba", "architectures": ["MambaForCausalLM"]},
    ],
    ids=lambda config: str(config["model_type"]),
)
def test_layers_of_all_kinds_cross_processes(config: dict[str, Any]) -> None:
    codec = Codec([Told])
    told = Told(arch_of(config).layers)
    (heard,) = FrameReader(codec).feed(bytes(codec.encode(told)))
    assert heard == told
