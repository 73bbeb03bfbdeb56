"""Granite 4: Granite, with Mamba 2 in most layers, and experts beside a shared MLP, or that MLP alone."""

from quire.config.config_keys import ConfigKeys
from quire.config.families import granite
from quire.config.family_spec import FamilySpec, MlpKind, MlpSpec, WeightNames, experts
from quire.config.layers.experts import granite_shared_experts
from quire.config.layers.layer_kinds import LayerKind
from quire.config.layers.recurrent import listed_mamba2


def _rotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    return (keys.raw.get("position_embedding_type") == "rope",) * len(kinds)


def _mlps(keys: ConfigKeys, num_layers: int, size: int) -> tuple[MlpSpec, ...]:
    if keys.raw.get("num_local_experts") == 0:
        shared = keys.count("shared_intermediate_size")
        return (MlpSpec(kind=MlpKind.GATED, intermediate_size=shared, has_bias=False),) * num_layers
    return experts(granite_shared_experts)(keys, num_layers, size)


SPEC = FamilySpec(
    architecture="GraniteMoeHybridForCausalLM",
    defaults={
        **granite.SPEC.defaults,
        "intermediate_size": 11_008,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    recurrent=listed_mamba2,
    rotated=_rotated,
    mlp=_mlps,
    scales=granite.scales,
    names=WeightNames(mlp="shared_mlp", gate_up=("input_linear",), down="output_linear"),
)
