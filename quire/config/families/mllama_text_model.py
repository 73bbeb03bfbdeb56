"""Llama 3.2 Vision (text): Llama 3, between whose layers stand others for images, which a text does not pass."""

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec
from quire.errors import counted

NUM_IMAGE_TOKENS = 8
"""Ids behind the vocabulary that have embeddings, but no logits."""


def image_layers(keys: ConfigKeys) -> frozenset[int]:
    """Those of `cross_attention_layers`."""
    name, listed = keys.find(("cross_attention_layers",))
    count = keys.count("num_hidden_layers")
    if not isinstance(listed, list | tuple) or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        keys.refuse(name, listed, f"must list numbers of the {counted(count, 'layer')}")
    found = frozenset(number for number in listed if 0 <= number < count)
    if len(found) == count:
        keys.refuse(name, listed, "must leave layers for texts")
    return found


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Embeddings for images stand behind those of the vocabulary."""
    size = keys.count("vocab_size")
    return {"vocab_size": size + NUM_IMAGE_TOKENS, "output_vocab_size": size}


SPEC = FamilySpec(
    architecture="MllamaForCausalLM",
    defaults={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "cross_attention_layers": (3, 8, 13, 18, 23, 28, 33, 38),
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    derived=derived,
    image_layers=image_layers,
    output_vocab="output_vocab_size",
    attention_bias=False,
    output_bias=False,
)
