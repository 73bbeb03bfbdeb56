"""CodeGen: GPT-J, with queries, values and keys in one tensor, in four groups of heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import gptj
from quire.config.family_spec import FamilySpec

GROUPS = 4
"""Of the machines that the first ones were trained on."""


def derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """Nothing, but heads must fall into groups."""
    heads = keys.count("num_attention_heads")
    if heads % GROUPS:
        keys.refuse("n_head", heads, f"must be a multiple of {GROUPS}")
    return {}


SPEC: FamilySpec = replace(
    gptj.SPEC,
    architecture="CodeGenForCausalLM",
    derived=derived,
    names=replace(gptj.SPEC.names, qkv=("qkv_proj",), qkv_groups=GROUPS),
)
