"""Jais 2: Llama, with layer norms, a plain MLP of squared ReLUs, and biases everywhere."""

from quire.config.family_spec import FamilySpec, NormKind, Norms, plain

SPEC = FamilySpec(
    architecture="Jais2ForCausalLM",
    spellings={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "hidden_act": "relu2",
        "max_position_embeddings": 8192,
        "attention_bias": True,
        "mlp_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 150_024,
    },
    norms=Norms(kind=NormKind.LAYER, has_bias=True),
    mlp=plain("mlp_bias"),
)
