"""GPT-BigCode (StarCoder, SantaCoder): GPT-2, whose queries share one key and value head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import gpt2
from quire.config.family_spec import FamilySpec


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """The number of key/value heads."""
    return {"num_key_value_heads": 1} if keys.flag("multi_query", default=True) else {}


SPEC: FamilySpec = replace(
    gpt2.SPEC,
    architecture="GPTBigCodeForCausalLM",
    defaults={**gpt2.SPEC.defaults, "activation_function": "gelu_pytorch_tanh"},
    derived=derived,
    names=replace(gpt2.SPEC.names, qkv_by_head=True, transposed=frozenset()),
)
