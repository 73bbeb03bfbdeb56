"""Mistral: Llama, with a window on every layer."""

from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.layer_kinds import all_sliding

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SPEC = FamilySpec(
    architecture="MistralForCausalLM",
    defaults=DEFAULTS,
    layer_kinds=all_sliding,
    attention_bias=False,
    output_bias=False,
    mlp=gated(),
)
