"""GPT-NeoX Japanese: GPT-NeoX in sequence, whose products have no bias but for the last layer's attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import gpt_neox
from quire.config.family_spec import FamilySpec, plain

ROTATION = gpt_neox.own_rotation(share=1.0)


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """The MLP is so many times as wide as the model."""
    size = keys.count("hidden_size") * keys.count("intermediate_multiple_size")
    return {**ROTATION(keys), "intermediate_size": size}


SPEC = FamilySpec(
    architecture="GPTNeoXJapaneseForCausalLM",
    spellings=gpt_neox.SPEC.spellings,
    defaults={
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 1.0,
        "intermediate_multiple_size": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 31_996,
        "eos_token_id": 31_999,
    },
    derived=_derived,
    ignored=gpt_neox.NEVER_READ,
    norms=gpt_neox.SPEC.norms,
    mlp=plain(),
    attention_bias=False,
    output_bias=False,
    last_output_bias="dense_bias",
    names=replace(gpt_neox.SPEC.names, base="gpt_neox_japanese"),
)
