"""Lara Mini: Qwen3.5 MoE, without gates; some layers have a window, and only those rotate."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.qwen3_next import EXPERTS
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, experts
from quire.config.layers.experts import ExpertsSpec, qwen2_experts
from quire.config.layers.gated_recurrence import LINEAR, gated_delta
from quire.config.layers.layer_kinds import LayerKind, listed_among
from quire.config.layers.recurrent import WINDOW_TYPES, listed_layers
from quire.config.layers.recurrent_mixers import DeltaLayout, RecurrentSpec

PATTERN = (LINEAR, LayerKind.SLIDING, LINEAR, LayerKind.FULL, LayerKind.SLIDING)
"""Of the layers of a config that does not list them, over and over."""


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Every layer has experts."""
    changes: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": None}
    if keys.raw.get("layer_types") is None:
        changes["layer_types"] = [PATTERN[index % len(PATTERN)] for index in range(keys.count("num_hidden_layers"))]
    return changes


def _recurrent(keys: ConfigKeys, num_layers: int) -> tuple[RecurrentSpec | None, ...]:
    return listed_layers(keys, gated_delta(keys, DeltaLayout.WHOLE), num_layers, (LINEAR,), WINDOW_TYPES)


def _rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    return tuple(kind is LayerKind.SLIDING for kind in kinds)


def _experts(keys: ConfigKeys, num_layers: int) -> tuple[ExpertsSpec | None, ...]:
    return tuple(spec and replace(spec, has_shared_gate=False) for spec in qwen2_experts(keys, num_layers))


SPEC = FamilySpec(
    architecture="LaraMiniForCausalLM",
    defaults={
        **EXPERTS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 512,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "num_experts_per_tok": 4,
        "num_experts": 128,
        "tie_word_embeddings": True,
        "eos_token_id": 151_643,
    },
    derived=_derived,
    recurrent=_recurrent,
    layer_kinds=listed_among(LINEAR),
    rotated=_rotated,
    norms=Norms(heads=HeadNorms.EACH),
    mlp=experts(_experts),
    names=WeightNames(recurrent="linear_attn"),
)
