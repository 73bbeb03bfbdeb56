"""The bytes of KV cache that the memory plan counts are those that are allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config.arch import ModelArch
from quire.ops.backends import ops_of
from quire.ops.contracts.ops import Ops
from quire.worker.cache_engine import CacheEngine
from tests.family_configs import FAMILIES
from tests.ops.implementations import implementations_of

NUM_BLOCKS = 3


@pytest.fixture(params=implementations_of("allocate_kv_cache"))
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_is_allocated(checkpoint: Callable[..., Path], ops: Ops, family: str, dtype: str) -> None:
    arch = ModelArch.from_config(json.loads((checkpoint(family) / "config.json").read_text()), source="config.json")
    has_rows = arch.family.compressed is not None or any(mixer.blocks or mixer.means for mixer in arch.plain_attentions)
    if dtype == "int8" and has_rows:
        pytest.skip("refused: rows of compressed attention, or of indexers, are not kept in 8 bits")
    for block_size in range(1, 65):
        if any(size % block_size for size in arch.whole_blocks):
            continue  # refused: attention within chunks, or to chosen blocks, takes whole blocks
        layout = arch.kv_layout(block_size, dtype, ops=ops.name)
        cache = CacheEngine(ops, layout, NUM_BLOCKS, num_ahead=0)
        allocated = sum(part.nbytes for part in cache.parts)
        assert allocated == NUM_BLOCKS * layout.block_bytes, f"block_size {block_size}"
