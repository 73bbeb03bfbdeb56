"""The bytes of weights that are planned are those of the tensors that a loaded model holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.memory.weights.formats import COMPACT_ISAS
from quire.config.memory.weights.shapes import (
    LinearShape,
    context_per_token,
    num_parameters,
    weight_shapes,
    window_shares,
)
from quire.config.memory.weights.sizes import packed_bytes, weight_bytes
from quire.loader.load import load_model
from quire.ops.backends import ops_of
from quire.ops.contracts.operands import LightningWeights
from quire.ops.cpu.library import isa, load
from quire.ops.cpu.runtime.dtypes import COMPACT, WEIGHT_DTYPES
from tests.engine.test_parity import available_ops
from tests.family_configs import FAMILIES

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen3 untied": ("qwen3", {"tie_word_embeddings": False}),
    "odd sizes": ("llama", {"hidden_size": 60, "intermediate_size": 90, "vocab_size": 333, "head_dim": 14}),
    "gemma3 with biases": ("gemma3_text", {"attention_bias": True, "tie_word_embeddings": False}),
    "mixtral tied": ("mixtral", {"tie_word_embeddings": True, "intermediate_size": 90}),
    "qwen2_moe all": ("qwen2_moe", {"decoder_sparse_step": 1, "moe_intermediate_size": 33}),
    "opt projected": ("opt", {"word_embed_proj_dim": 32}),
    "opt of norms without values": ("opt", {"layer_norm_elementwise_affine": False}),
    "opt with norms behind": ("opt", {"do_layer_norm_before": False}),
    "opt without biases": ("opt", {"enable_bias": False}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "gemma4 with experts": (
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 3,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "attention_k_eq_v": True,
            "attention_bias": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "apertus 1.5 with fewer logits": ("apertus1p5_text", {"vocab_size": 400, "output_vocab_size": 320}),
    "laguna with gates of features": ("laguna", {"gating": "per-element", "attention_bias": True}),
    "longcat flash with biases": ("longcat_flash", {"attention_bias": True, "tie_word_embeddings": True}),
    "axk2 tied": ("axk2", {"attention_bias": True, "tie_word_embeddings": True, "first_k_dense_replace": 0}),
    "glm 5 with a shared choice": ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared"]}),
    "dots3 note with biases": ("dots3_note_text", {"attention_bias": True, "tie_word_embeddings": True}),
    "hy v4 with biases": ("hy_v4", {"attention_bias": True, "tie_word_embeddings": True, "hc_mult": 5}),
    "modernbert decoder with biases": (
        "modernbert-decoder",
        {"norm_bias": True, "classifier_bias": True, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "beam with biases": ("beam", {"attention_bias": True, "tie_word_embeddings": True}),
    "zamba with biases": ("zamba", {"mamba_proj_bias": True, "n_mamba_heads": 4, "attention_head_dim": 24}),
    "doge with biases": ("doge", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "dory with biases": ("dory", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "zaya with biases": ("zaya", {"attention_bias": True, "lm_head_bias": True, "tie_word_embeddings": False}),
    "mimo v2 flash with biases": ("mimo_v2_flash", {"attention_bias": True, "attention_value_scale": None}),
}
COMBINATIONS = [
    ("cpu", "float32", None),
    ("cpu", "bfloat16", None),
    ("cpu", "float16", None),
    ("cpu", "bfloat16", "int8"),
    ("cpu", "bfloat16", "int4"),
    ("reference", "float32", None),
    ("reference", "bfloat16", None),
]


@pytest.fixture(params=COMBINATIONS, ids=lambda combination: "-".join(map(str, combination)))
def combination(request: pytest.FixtureRequest) -> tuple[str, str, str | None]:
    if request.param[0] not in available_ops():
        pytest.skip("the native kernels are not built")
    combination: tuple[str, str, str | None] = request.param
    return combination


@pytest.mark.parametrize("variant", VARIANTS)
def test_planned_is_loaded(
    checkpoint: Callable[..., Path], combination: tuple[str, str, str | None], variant: str
) -> None:
    ops, dtype, quantization = combination
    family, overrides = VARIANTS[variant]
    path = checkpoint(family, **overrides)
    arch = ModelArch.from_config(json.loads((path / "config.json").read_text()), source="config.json")
    model = load_model(
        path, arch, ops=ops_of(ops), dtype=getattr(torch, dtype), max_model_len=64, quantization=quantization
    )
    loaded = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in tensors_of(model)}.values())
    planned = weight_bytes(arch, dtype, quantization, ops=ops, isa=isa() if ops == "cpu" else "")
    unused = arch.family.names.unused_positions
    if unused:  # rows of the table that are never looked at, but they are held
        loaded += unused * arch.hidden_size * getattr(torch, dtype).itemsize
    assert loaded == planned


def tensors_of(thing: object) -> Iterator[Tensor]:
    """Every parameter of a model. Tables of positions, and slopes and decays that follow from the heads, are none."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, LightningWeights):
        yield thing.norm
    elif isinstance(thing, (list, tuple)):
        for item in thing:
            yield from tensors_of(item)
    elif isinstance(thing, dict):
        yield from tensors_of(
            [value for name, value in thing.items() if name not in ("cos_sin", "slopes", "query_scales")]
        )
    elif type(thing).__module__.startswith("quire.") and not isinstance(thing, ModelArch):
        yield from tensors_of(fields_of(thing))


def fields_of(thing: object) -> dict[str, object]:
    slots = getattr(type(thing), "__slots__", None)
    return {name: getattr(thing, name) for name in slots if name != "__weakref__"} if slots else vars(thing)


GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
"""As it was published, but for what concerns training."""


def test_a_published_model_is_counted_as_its_page_says() -> None:
    arch = ModelArch.from_config(GEMMA_3_1B, source="config.json")
    assert num_parameters(arch) == 999_885_952
    assert weight_bytes(arch, "bfloat16", ops="reference") == 2 * 999_885_952 + 2 * weight_shapes(arch).floats
    assert sorted(rope.theta for rope in arch.ropes) == [10_000.0, 1_000_000.0]
    layout = arch.kv_layout(16, "bfloat16", ops="cpu")
    assert [len(group.layers) for group in layout.groups] == [4] * 6 + [2]
    assert layout.most_blocks(32_768, 512) == 2048 + 6 * 65, "seven times 2048 without windows"


@pytest.mark.parametrize("shape", [(32, 32), (96, 64), (100, 90), (4096, 2048), (151_936, 1024), (1, 1)])
def test_packed_sizes_are_the_librarys(shape: tuple[int, int]) -> None:
    if "cpu" not in available_ops():
        pytest.skip("the native kernels are not built")
    lib, (rows, columns) = load(), shape
    linear = LinearShape(parts=(rows,), in_features=columns)
    for dtype, code in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        assert packed_bytes(linear, code, ops="cpu") == lib.qr_packed_bytes(WEIGHT_DTYPES[dtype], rows, columns)
    compact = packed_bytes(linear, "bfloat16", ops="cpu", isa="amx")
    assert compact == lib.qr_packed_bytes(WEIGHT_DTYPES[COMPACT], rows, columns)


@pytest.mark.parametrize("isa", COMPACT_ISAS)
def test_weights_take_12_bits_however_they_are_cut_into_parts(isa: str) -> None:
    def packed(*parts: int) -> int:
        return packed_bytes(LinearShape(parts=parts, in_features=1024), "bfloat16", ops="cpu", isa=isa)

    whole = packed_bytes(LinearShape(parts=(128,), in_features=1024), "bfloat16", ops="cpu")
    assert packed(64, 64) == packed(60, 68) == packed(128) < 0.76 * whole


def test_reading_context_is_weighed_against_the_linear_layers() -> None:
    """Numbers of Llama 3.2 1B's config.json, by hand."""
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    linear = 2048 * (32 + 8 + 8) * 64 + 32 * 64 * 2048 + 3 * 2048 * 8192  # of a layer: q, k, v; o; gate, up, down
    attention = 2 * 32 * 64  # of a layer and a token of context: scores, and the sum of values
    arch = ModelArch.from_config(config, source="config.json")
    assert linear == 60_817_408
    assert context_per_token(arch) == linear / attention == 14_848
    assert window_shares(arch) == ()


def test_layers_with_a_window_are_told_apart() -> None:
    config = {
        "model_type": "gemma2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 100,
    }
    arch = ModelArch.from_config(config, source="config.json")
    assert window_shares(arch) == ((100, 3 / 5),)
