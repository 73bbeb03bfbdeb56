"""MPT: ALiBi instead of positions, no biases at all, a plain MLP; attention has an object of its own in config.json."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, NormKind, Norms, Scales, WeightNames, plain
from quire.config.layers.alibi import interleaved_slopes

UNLIKE = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_uses_sequence_id": False,
}
"""Keys of `attn_config` -> the only value that transformers computes, or that quire does."""


def attention(keys: ConfigKeys) -> ConfigKeys:
    """The keys of attention. Raises: ConfigError for attention of another kind."""
    given = keys.raw.get("attn_config")
    if given is not None and not isinstance(given, Mapping):
        keys.refuse("attn_config", given, "must be null or an object")
    inner = ConfigKeys(given or {}, f"{keys.source}: attn_config", {"softmax_scale": None, "clip_qkv": None})
    for name, known in UNLIKE.items():
        if inner.raw.get(name, known) != known:
            inner.refuse(name, inner.raw[name], f"must be {known!r}")
    return inner


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """The sizes that are not keys of the family, and what is among those of attention."""
    return {
        "intermediate_size": 4 * keys.count("hidden_size"),
        "num_key_value_heads": None,
        "head_dim": None,
        "clip_qkv": attention(keys).optional_positive("clip_qkv"),
    }


def slopes(keys: ConfigKeys, num_heads: int) -> tuple[float, ...]:
    """MPT orders them in its own way where the number of heads is no power of two."""
    return interleaved_slopes(num_heads)


SPEC = FamilySpec(
    architecture="MptForCausalLM",
    spellings={
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={"hidden_act": "gelu", "max_seq_len": 2048, "clip_qkv": None, "tie_word_embeddings": True},
    derived=derived,
    refused={"logit_scale": "scales no logits of MPT. Use a checkpoint whose config says null."},
    slopes=slopes,
    norms=Norms(kind=NormKind.LAYER, input="norm_1", pre_mlp="norm_2", final="norm_f"),
    attention_bias=False,
    output_bias=False,
    mlp=plain(),
    scales=lambda keys: Scales(query=attention(keys).optional_positive("softmax_scale")),
    names=WeightNames(
        base="transformer",
        embedding="wte",
        layers="blocks",
        attention="attn",
        qkv=("Wqkv",),
        output="out_proj",
        mlp="ffn",
    ),
)
