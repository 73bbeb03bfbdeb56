"""Qwen2 and Qwen2.5: Llama, with a bias on queries, keys and values, and windows on some layers."""

from quire.config.family_spec import FamilySpec, gated
from quire.config.layers.layer_kinds import full_below, listed_or

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

SPEC = FamilySpec(
    architecture="Qwen2ForCausalLM",
    defaults=DEFAULTS,
    layer_kinds=listed_or(full_below),
    window_flag="use_sliding_window",
    attention_bias=True,
    output_bias=False,
    mlp=gated(),
)
