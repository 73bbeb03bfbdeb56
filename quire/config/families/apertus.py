"""Apertus: Llama, with a plain MLP of learned xIELUs, a norm on each query and key head, and a stretched rotation."""

from quire.config.family_spec import FamilySpec, HeadNorms, Norms, plain
from quire.config.layers.rope import unless_given

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

SPEC = FamilySpec(
    architecture="ApertusForCausalLM",
    defaults={
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65_536,
        "rope_theta": 12_000_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=unless_given(ROPE),
    norms=Norms(input="attention_layernorm", pre_mlp="feedforward_layernorm", heads=HeadNorms.EACH),
    mlp=plain(),
)
