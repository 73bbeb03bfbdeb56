"""Gemma, the first: Llama, with scaled embeddings; the checkpoint stores norm weights less one."""

import math

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, Norms, Scales

CAUSAL_ONLY = {"use_bidirectional_attention": "generates with causal attention only. Use a generative checkpoint."}


def scales(keys: ConfigKeys) -> Scales:
    """Gemma 2 and 3 also have a scale of queries."""
    query = None
    if "query_pre_attn_scalar" in keys.defaults:
        query = 1.0 / math.sqrt(keys.positive("query_pre_attn_scalar"))
    return Scales(embedding=math.sqrt(keys.count("hidden_size")), query=query)


SPEC = FamilySpec(
    architecture="GemmaForCausalLM",
    spellings={"hidden_act": "hidden_activation"},
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    refused=CAUSAL_ONLY,
    aliases={"gelu": "gelu_pytorch_tanh"},  # in early configs
    norms=Norms(offset=1.0),
    scales=scales,
)
