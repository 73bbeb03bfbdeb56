"""GLM-4 of 2024: Llama, rotating neighbours in half of each head; gate and up are one tensor of the checkpoint."""

from quire.config.family_spec import FamilySpec, WeightNames, gated

DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
}
NAMES = WeightNames(gate_up=("gate_up_proj",))

SPEC = FamilySpec(
    architecture="GlmForCausalLM",
    defaults=DEFAULTS,
    rotates_pairs=True,
    output_bias=False,
    mlp=gated(),
    names=NAMES,
)
