"""DiffLlama: Llama with differential attention, whose heads attend to the values of two KV heads each."""

import math
from collections.abc import Sequence
from dataclasses import replace

from quire.config.config_keys import ConfigKeys
from quire.config.families.llama import SPEC as LLAMA
from quire.config.family_spec import gated


def differences(keys: ConfigKeys, num_layers: int) -> Sequence[float]:
    """What the factor begins with: more in deeper layers."""
    count = keys.count("num_key_value_heads", default=keys.count("num_attention_heads"))
    if count % 2:
        keys.refuse("num_key_value_heads", count, "must be even: values of two KV heads lie together")
    return [0.8 - 0.6 * math.exp(-0.3 * index) for index in range(num_layers)]


SPEC = replace(
    LLAMA,
    architecture="DiffLlamaForCausalLM",
    defaults={
        **LLAMA.defaults,
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
    },
    differences=differences,
    mlp=gated(),
)
