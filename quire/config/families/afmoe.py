"""AFMoE: Llama, with gated attention, norms on both sides, and a mixture of experts; layers with a window rotate."""

import math

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, Scales, WeightNames, experts
from quire.config.layers.experts import afmoe_experts
from quire.config.layers.layer_kinds import LayerKind, full_by_pattern, listed_or


def _rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    return tuple(kind is LayerKind.SLIDING for kind in kinds)


def _scales(keys: ConfigKeys) -> Scales:
    is_scaled = keys.flag("mup_enabled", default=False)
    return Scales(embedding=math.sqrt(keys.count("hidden_size")) if is_scaled else 1.0)


SPEC = FamilySpec(
    architecture="AfmoeForCausalLM",
    spellings={"sliding_window_pattern": "global_attn_every_n_layers"},
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16_384,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
        "num_dense_layers": 1,
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
    },
    layer_kinds=listed_or(full_by_pattern),
    rotated=_rotated,
    is_gated=True,
    norms=Norms(
        post_attention="post_attention_layernorm",
        pre_mlp="pre_mlp_layernorm",
        post_mlp="post_mlp_layernorm",
        heads=HeadNorms.EACH,
    ),
    mlp=experts(afmoe_experts),
    scales=_scales,
    names=WeightNames(gate="gate_proj"),
)
