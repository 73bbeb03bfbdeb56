"""Attention over blocks of tokens that an indexer chooses by their means, as config.json of Qwen4-Exp describes it."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.config_keys import ConfigKeys
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import MeanIndexerSpec
from quire.config.layers.rope import RopeConfig

MAX_HEADS = 4096
MAX_INDEX_SIZE = 1024
MAX_BLOCK = 8192
"""Tokens of a block; more can only be a mistake."""


def mean_indexers(
    keys: ConfigKeys, num_layers: int, heads: Heads, rope: RopeConfig | None
) -> Sequence[MeanIndexerSpec | None]:
    """The same in all layers that have attention."""
    num_heads, size = keys.count("indexer_n_heads", most=MAX_HEADS), keys.count("indexer_head_dim", most=MAX_INDEX_SIZE)
    rotary_dim = rope.rotary_dim if rope else 0
    if keys.count("indexer_kv_heads") != 1:
        keys.refuse("indexer_kv_heads", keys.raw["indexer_kv_heads"], "must be 1: all queries read one key")
    if size % 2 or size < rotary_dim:
        problem = f"must be even, and no less than what rotates of a head ({rotary_dim})"
        keys.refuse("indexer_head_dim", size, problem)
    rate, budget = keys.count("indexer_compress_ratio", most=MAX_BLOCK), keys.count("indexer_budget")
    if budget % rate:
        keys.refuse("indexer_budget", budget, f"must be a multiple of indexer_compress_ratio ({rate})")
    spec = MeanIndexerSpec(num_heads=num_heads, head_size=size, rate=rate, num_selected=budget // rate)
    return [spec] * num_layers
