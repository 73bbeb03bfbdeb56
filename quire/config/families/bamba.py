"""Bamba: Llama, with Mamba 2 in place of most layers' attention, and rotation of half of each head."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Norms, WeightNames
from quire.config.layers.recurrent import bamba_layers


def _half_rotated(keys: ConfigKeys) -> Mapping[str, Any]:
    """transformers sets the part, unless it is among those of the rotation."""
    return {"partial_rotary_factor": 0.5}


SPEC = FamilySpec(
    architecture="BambaForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=_half_rotated,
    recurrent=bamba_layers,
    norms=Norms(pre_mlp="pre_ff_layernorm", final="final_layernorm"),
    names=WeightNames(mlp="feed_forward"),
)
