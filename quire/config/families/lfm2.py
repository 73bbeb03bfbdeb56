"""LFM2: short gated convolutions in most layers, attention with norms of heads in the others."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames
from quire.config.layers.recurrent import short_conv_layers
from quire.utils.math import round_up


def _sizes(keys: ConfigKeys) -> Mapping[str, Any]:
    """The MLP's width, and older names."""
    size = keys.count("block_ff_dim", "intermediate_size")
    if keys.flag("block_auto_adjust_ff_dim", default=True):
        size = int(keys.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
        size = round_up(size, keys.count("block_multiple_of", default=256))
    return {
        "intermediate_size": size,
        "tie_word_embeddings": keys.flag("tie_embedding", default=keys.flag("tie_word_embeddings", default=True)),
    }


SPEC = FamilySpec(
    architecture="Lfm2ForCausalLM",
    spellings={"rms_norm_eps": "norm_eps"},
    defaults={
        "hidden_act": "silu",
        "norm_eps": 1e-5,
        "intermediate_size": 12_288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=_sizes,
    recurrent=short_conv_layers,
    norms=Norms(input="operator_norm", pre_mlp="ffn_norm", final="embedding_norm", heads=HeadNorms.EACH),
    attention_bias=False,
    output_bias=False,
    names=WeightNames(
        output="out_proj",
        q_norm="q_layernorm",
        k_norm="k_layernorm",
        recurrent="conv",
        mlp="feed_forward",
        gate_up=("w1", "w3"),
        down="w2",
    ),
)
