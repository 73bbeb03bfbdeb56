"""Code World Model: Llama, with windows on three layers of four, and a stretched rotation."""

from quire.config.family_spec import FamilySpec
from quire.config.layers.layer_kinds import first_full_of, listed_or
from quire.config.layers.rope import unless_given

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

SPEC = FamilySpec(
    architecture="CwmForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "sliding_window": 8192,
        "bos_token_id": 128_000,
        "eos_token_id": [128_001, 128_008, 128_009],
    },
    derived=unless_given(ROPE),
    layer_kinds=listed_or(first_full_of(4)),
    attention_bias=False,
    output_bias=False,
)
