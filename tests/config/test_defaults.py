"""Keys that config.json leaves out mean what they mean to transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config.arch import ModelArch
from quire.errors import ConfigError
from tests.config.test_arch import comparable
from tests.family_configs import FAMILIES

NEEDED = {
    "cohere_compass_text": {"rope_parameters"},
    "lfm2_moe": {"layer_types"},
    "zamba2": {"layers_block_type", "layer_types"},
    "dots1": {"n_routed_experts", "n_shared_experts", "num_experts_per_tok"},
    "gemma3n_text": {"num_kv_shared_layers", "layer_types"},
    "gemma4_text": {"vocab_size_per_layer_input"},
    "dory": {"layer_types", "n_input_layers", "n_recurrent_layers", "n_output_layers"},
    "qwen4_exp_text": {
        "head_dim",
        "indexer_n_heads",
        "indexer_kv_heads",
        "indexer_head_dim",
        "indexer_budget",
        "indexer_compress_ratio",
    },
}
"""Keys for which the class of a family in transformers has no default that it could run with."""


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_left_out_mean_what_transformers_means(
    checkpoint: Callable[..., Path], family: str, tmp_path: Path
) -> None:
    """Old configs list only what differs from the class's defaults."""
    from transformers import AutoConfig

    full = json.loads((checkpoint(family) / "config.json").read_text())
    sizes = {
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "n_embd", "n_layer", "n_head", "ffn_dim", "ffn_hidden_size",
            "rotary_dim", "d_model", "n_layers", "n_heads", "num_layers", "num_heads", "attention_types",
        "eos_token_id", "bos_token_id", "pad_token_id",
    }  # fmt: skip
    if family == "mamba2":  # the class's defaults fit its own width alone
        sizes |= {"num_heads", "head_dim"}
    short = {key: value for key, value in full.items() if key in sizes | NEEDED.get(family, set())}
    config = AutoConfig.for_model(**{key: value for key, value in short.items() if key != "architectures"})
    expanded = {**config.to_dict(), "architectures": full["architectures"], "dtype": None}
    assert comparable(ModelArch.from_config(short, source="")) == comparable(ModelArch.from_config(expanded, source=""))


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
@pytest.mark.parametrize("family", ["ernie4_5", "internlm3", "llama"])
def test_null_is_what_follows_from_other_keys_and_not_the_default(family: str, key: str) -> None:
    """Two of these families have numbers as defaults of both keys, which the config does not mean."""
    from transformers import AutoConfig

    short = {**FAMILIES[family], "model_type": family, "architectures": None, key: None}
    expanded = {**AutoConfig.for_model(family, **FAMILIES[family] | {key: None}).to_dict(), "architectures": None}
    assert comparable(ModelArch.from_config(short, source="")) == comparable(ModelArch.from_config(expanded, source=""))


def test_layers_that_share_a_block_are_those_of_their_kinds() -> None:
    """transformers takes the blocks' order from either key."""
    config = {**FAMILIES["zamba2"], "model_type": "zamba2", "architectures": ["Zamba2ForCausalLM"]}
    kinds = config["layers_block_type"]
    hybrid = [index for index, kind in enumerate(kinds) if kind == "hybrid"]
    ModelArch.from_config({**config, "hybrid_layer_ids": hybrid}, source="")
    with pytest.raises(ConfigError, match=r"hybrid_layer_ids is .*; it must be .* of layers_block_type in their order"):
        ModelArch.from_config({**config, "hybrid_layer_ids": hybrid[::-1]}, source="")
