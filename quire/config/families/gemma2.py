"""Gemma 2: Gemma, with norms on both sides, soft caps on scores and logits, and windows on half the layers."""

from quire.config.families.gemma import CAUSAL_ONLY, scales
from quire.config.family_spec import FamilySpec, HeadNorms, Norms
from quire.config.layers.layer_kinds import full_every, listed_or

DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def both_sides(heads: HeadNorms = HeadNorms.NONE, *, offset: float = 1.0, of_values: bool = False) -> Norms:
    """Norms before and behind attention and MLP."""
    return Norms(
        offset=offset,
        post_attention="post_attention_layernorm",
        pre_mlp="pre_feedforward_layernorm",
        post_mlp="post_feedforward_layernorm",
        heads=heads,
        of_values=of_values,
    )


SPEC = FamilySpec(
    architecture="Gemma2ForCausalLM",
    spellings={"hidden_act": "hidden_activation"},
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    refused=CAUSAL_ONLY,
    layer_kinds=listed_or(full_every(2)),
    norms=both_sides(),
    scales=scales,
)
