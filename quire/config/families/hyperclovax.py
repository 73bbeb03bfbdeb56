"""HyperCLOVA X: Granite, with norms behind attention and MLP, and logits multiplied instead of divided."""

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Norms, Scales


def scales(keys: ConfigKeys) -> Scales:
    """Each by a key of its own; that of queries may say null."""
    head_size = keys.count("head_dim", default=keys.count("hidden_size") // keys.count("num_attention_heads"))
    return Scales(
        embedding=keys.positive("embedding_multiplier", default=1.0),
        query=keys.optional_positive("attention_multiplier") or head_size**-0.5,
        residual=keys.positive("residual_multiplier", default=1.0),
        logits=keys.positive("logits_scaling", default=1.0),
    )


def norms(keys: ConfigKeys) -> Norms:
    """On both sides of attention and MLP unless the config says otherwise."""
    if not keys.flag("use_post_norm", default=True):
        return Norms()
    return Norms(post_attention="post_norm1", post_mlp="post_norm2")


SPEC = FamilySpec(
    architecture="HyperCLOVAXForCausalLM",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    norms=norms,
    scales=scales,
)
