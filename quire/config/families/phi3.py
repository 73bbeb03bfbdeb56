"""Phi-3, Phi-3.5 and Phi-4, the dense text models: Llama, with a checkpoint that is already fused."""

from quire.config.family_spec import FamilySpec, WeightNames, gated
from quire.config.layers.layer_kinds import all_sliding

SPEC = FamilySpec(
    architecture="Phi3ForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 32_000,
    },
    aliases={"yarn": "longrope"},  # in early configs
    layer_kinds=all_sliding,
    attention_bias=False,
    output_bias=False,
    mlp=gated(),
    names=WeightNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
)
