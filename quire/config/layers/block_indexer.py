"""Attention over blocks of tokens that an indexer chooses, as config.json of MiniMax M3 describes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.layers.experts import whole_number
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import BlockIndexerSpec
from quire.config.layers.rope import RopeConfig
from quire.errors import counted

FULL, SPARSE = "full_attention", "minimax_m3_sparse"
NESTED = "sparse_attention_config"
"""What published configs have the keys of indexers in."""
SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "index_n_heads": "sparse_num_index_heads",
        "index_head_dim": "sparse_index_dim",
        "index_block_size": "sparse_block_size",
        "index_topk_blocks": "sparse_topk_blocks",
        "index_local_blocks": "sparse_local_block",
    }
)
"""Key -> what it is called there."""
MAX_INDEX_SIZE = 1024
MAX_BLOCK = 8192
"""Tokens of a block; more can only be a mistake."""


def sparse_keys(keys: ConfigKeys) -> Mapping[str, Any]:
    """What a published config nests, as transformers writes it; of layers, the list where there is none yet."""
    nested = keys.raw.get(NESTED)
    if nested is None:
        return {}
    if not isinstance(nested, Mapping):
        keys.refuse(NESTED, nested, "must be null or an object")
    found = {name: nested[published] for name, published in SPELLINGS.items() if published in nested}
    flags = nested.get("sparse_attention_freq")
    if flags is not None and keys.raw.get("layer_types") is None:
        if not isinstance(flags, list):
            keys.refuse(f"{NESTED}.sparse_attention_freq", flags, "must list 0 or 1 for each layer")
        found["layer_types"] = [SPARSE if flag else FULL for flag in flags]
    return found


def indexed_blocks(
    keys: ConfigKeys, num_layers: int, heads: Heads, rope: RopeConfig | None
) -> Sequence[BlockIndexerSpec | None]:
    """An indexer in the layers that `layer_types` names, none in any by default."""
    listed = keys.raw.get("layer_types")
    if listed is None:
        return [None] * num_layers
    valid = isinstance(listed, list) and len(listed) == num_layers and {*map(str, listed)} <= {FULL, SPARSE}
    if not valid:
        keys.refuse("layer_types", listed, f"must list {FULL} or {SPARSE} for each of {counted(num_layers, 'layer')}")
    spec = _indexer(keys, heads.num_kv_heads, rope.rotary_dim if rope else 0) if SPARSE in listed else None
    return [spec if kind == SPARSE else None for kind in listed]


def _indexer(keys: ConfigKeys, num_kv_heads: int, rotary_dim: int) -> BlockIndexerSpec:
    num_heads, size = keys.count("index_n_heads"), keys.count("index_head_dim", most=MAX_INDEX_SIZE)
    if num_heads != num_kv_heads:
        problem = f"must be num_key_value_heads ({num_kv_heads}): blocks are chosen for the queries of each"
        keys.refuse("index_n_heads", num_heads, problem)
    if size % 2 or size < rotary_dim:
        problem = f"must be even, and no less than what rotates of a head ({rotary_dim})"
        keys.refuse("index_head_dim", size, problem)
    num_selected, num_local = keys.count("index_topk_blocks"), whole_number(keys, "index_local_blocks")
    if num_local > num_selected:
        problem = f"must be at most index_topk_blocks ({num_selected}), which counts them"
        keys.refuse("index_local_blocks", num_local, problem)
    return BlockIndexerSpec(
        num_heads=num_heads,
        head_size=size,
        block_size=keys.count("index_block_size", most=MAX_BLOCK),
        num_selected=num_selected,
        num_local=num_local,
    )
