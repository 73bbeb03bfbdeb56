"""Granite 3, the dense models: Llama, with factors on embeddings, queries, the residual and logits."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Scales


def scales(keys: ConfigKeys) -> Scales:
    """Each by a key of its own."""
    return Scales(
        embedding=keys.positive("embedding_multiplier", default=1.0),
        query=keys.positive("attention_multiplier", default=1.0),
        residual=keys.positive("residual_multiplier", default=1.0),
        logits=1.0 / keys.positive("logits_scaling", default=1.0),
    )


SPEC = FamilySpec(
    architecture="GraniteForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    scales=scales,
)
