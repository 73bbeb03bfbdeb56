"""Falcon 7B, 40B, 180B, RW: parallel attention and plain MLP behind one layer norm or two; few key and value heads."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, WeightNames, plain
from quire.config.layers.alibi import in_bfloat16, slopes_of


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Three generations: as many key/value heads as said, one, or as many as queries."""
    heads = keys.count("num_attention_heads")
    if keys.flag("new_decoder_architecture", default=False):
        return {"num_key_value_heads": keys.count("num_kv_heads", default=heads), "parallel_attn": True}
    return {"num_key_value_heads": 1 if keys.flag("multi_query", default=True) else heads}


def norms(keys: ConfigKeys) -> Norms:
    """Attention and MLP of the last generation have one each, though parallel, unless the config says otherwise."""
    one = Norms(kind=NormKind.LAYER, has_bias=True, pre_mlp=None, final="ln_f")
    if keys.flag("new_decoder_architecture", default=False) and keys.count("num_ln_in_parallel_attn", default=2) == 2:
        return replace(one, input="ln_attn", pre_mlp="ln_mlp")
    return one if keys.flag("parallel_attn", default=True) else replace(one, pre_mlp="post_attention_layernorm")


def slopes(keys: ConfigKeys, num_heads: int) -> tuple[float, ...] | None:
    """Falcon RW has ALiBi instead of a rotation. It scales the slopes as it scales scores."""
    if not keys.flag("alibi", default=False):
        return None
    scale = 1.0 / math.sqrt(keys.count("hidden_size") // num_heads)
    return tuple(in_bfloat16(slope) * scale for slope in slopes_of(num_heads))


SPEC = FamilySpec(
    architecture="FalconForCausalLM",
    spellings={
        "rms_norm_eps": "layer_norm_epsilon",
        "intermediate_size": "ffn_hidden_size",
        "hidden_act": "activation",
    },
    defaults={
        "activation": "gelu",
        "max_position_embeddings": 2048,
        "parallel_attn": True,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
    },
    derived=derived,
    slopes=slopes,
    norms=norms,
    is_parallel="parallel_attn",
    attention_bias="bias",
    output_bias="bias",
    mlp=plain("bias"),
    names=WeightNames(
        base="transformer",
        embedding="word_embeddings",
        layers="h",
        attention="self_attention",
        qkv=("query_key_value",),
        qkv_by_head=True,
        output="dense",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    ),
)
