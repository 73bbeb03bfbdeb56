"""Zamba: layers of Mamba, whose heads derive their time steps each by itself, some of which read attention and an MLP
that they share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families.zamba2 import SPEC as ZAMBA2
from quire.config.families.zamba2 import are_hybrid, check_tied
from quire.config.family_spec import Scales, WeightNames
from quire.config.layers.layer_kinds import none_rotated
from quire.config.layers.mixers import SharedBlock
from quire.config.layers.recurrent import offset_of, zamba_layers


def _kinds(keys: ConfigKeys) -> list[str]:
    """The third layer reads the block, and one of each `attn_layer_period` behind it."""
    period, offset = keys.count("attn_layer_period"), offset_of(keys, "attn_layer_offset")
    behind = range(keys.count("num_hidden_layers") - 3)
    return ["mamba", "mamba", "hybrid", *("hybrid" if index % period == offset else "mamba" for index in behind)]


def _derived(keys: ConfigKeys) -> Mapping[str, Any]:
    """transformers counts the kinds, whatever `num_hidden_layers` says. Attention reads two hidden states."""
    hidden_size, num_heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    check_tied(keys)
    width = keys.count("attention_hidden_size", default=2 * hidden_size)
    if width != 2 * hidden_size:
        keys.refuse("attention_hidden_size", width, f"must be twice hidden_size ({hidden_size})")
    _, listed = keys.find(("layers_block_type", "layer_types"))
    changes = {"layers_block_type": _kinds(keys) if listed is None else listed}
    kinds = are_hybrid(ConfigKeys(changes, keys.source))
    head_size = keys.count("attention_head_dim", default=2 * hidden_size // num_heads)
    return {**changes, "num_hidden_layers": len(kinds), "head_dim": head_size}


def _shared(keys: ConfigKeys, num_layers: int) -> tuple[SharedBlock | None, ...]:
    """All layers that read a block read the same one, without adapters."""
    hybrid = [index for index, is_hybrid in enumerate(are_hybrid(keys)) if is_hybrid]
    blocks = {
        index: SharedBlock(
            name="shared_transf",
            first=hybrid[0],
            is_first=number == 0,
            number=number,
            intermediate_size=keys.count("intermediate_size"),
            has_bias=False,
            rank=0,
            adapts_attention=False,
        )
        for number, index in enumerate(hybrid)
    }
    return tuple(blocks.get(index) for index in range(num_layers))


def _scales(keys: ConfigKeys) -> Scales:
    return Scales(query=(keys.count("head_dim") / 2) ** -0.5)


SPEC = replace(
    ZAMBA2,
    architecture="ZambaForCausalLM",
    defaults={
        "hidden_act": "gelu",
        "hidden_mamba_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 32_000,
        "hidden_size": 3712,
        "intermediate_size": 14_848,
        "num_hidden_layers": 76,
        "max_position_embeddings": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "attn_layer_period": 6,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "n_mamba_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    derived=_derived,
    refused={},
    recurrent=zamba_layers,
    shared=_shared,
    rotated=none_rotated,
    scales=_scales,
    names=WeightNames(),
)
