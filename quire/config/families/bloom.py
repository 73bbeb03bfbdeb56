"""BLOOM: ALiBi instead of positions, a layer norm of embeddings, biases everywhere, a plain MLP."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import falcon
from quire.config.family_spec import FamilySpec, NormKind, Norms, plain
from quire.config.layers.alibi import slopes_of


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """The sizes that are not keys of the family."""
    size = keys.count("hidden_size")
    return {"intermediate_size": 4 * size, "num_key_value_heads": None, "head_dim": None}


SPEC = FamilySpec(
    architecture="BloomForCausalLM",
    spellings={
        "hidden_size": "n_embed",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_act": "gelu_new",
        "seq_length": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=derived,
    refused={
        "apply_residual_connection_post_layernorm": "adds to the residual as it was before the norm. Use a BLOOM "
        "whose config says false."
    },
    slopes=lambda keys, num_heads: slopes_of(num_heads),
    norms=Norms(kind=NormKind.LAYER, has_bias=True, embedding="word_embeddings_layernorm", final="ln_f"),
    attention_bias=True,
    output_bias=True,
    mlp=plain(True),
    names=falcon.SPEC.names,
)
