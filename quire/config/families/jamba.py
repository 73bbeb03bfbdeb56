"""Jamba: Mamba with norms in most layers, attention without rotation in the others, experts in every other layer."""

from quire.config.family_spec import FamilySpec, Norms, WeightNames, experts
from quire.config.layers.experts import jamba_experts
from quire.config.layers.layer_kinds import none_rotated
from quire.config.layers.recurrent import jamba_layers

SPEC = FamilySpec(
    architecture="JambaForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    recurrent=jamba_layers,
    rotated=none_rotated,
    norms=Norms(pre_mlp="pre_ff_layernorm", final="final_layernorm"),
    mlp=experts(jamba_experts),
    attention_bias=False,
    output_bias=False,
    names=WeightNames(mlp="feed_forward"),
)
