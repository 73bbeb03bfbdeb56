"""OLMo, the first: Llama, whose layer norms have no values of their own."""

from quire.config.family_spec import FamilySpec, NormKind, Norms, gated

DEFAULTS = {"hidden_act": "silu", "max_position_embeddings": 2048, "eos_token_id": 50_279}
CLIPPED = {"clip_qkv": None}

SPEC = FamilySpec(
    architecture="OlmoForCausalLM",
    defaults={**DEFAULTS, **CLIPPED},
    norms=Norms(kind=NormKind.LAYER, has_weight=False),
    mlp=gated(),
)
