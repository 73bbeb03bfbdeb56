"""How the library is told where caches of rows lie, and the sequences of a step."""

from __future__ import annotations

from torch import Tensor

from quire.ops.contracts.operands import AttentionMetadata, RowCache


def row_places(cache: Tensor) -> tuple[int, ...]:
    """How rows lie: blocks, rows of each, their width, and what lies from block to block."""
    _, num_blocks, _, count, width = cache.shape
    assert cache.stride(0) == num_blocks * cache.stride(1), "halves follow each other"
    return num_blocks, count, width, cache.stride(1)


def step_rows(cache: RowCache) -> tuple[int, ...]:
    """How a cache's rows lie, and where those of the sequences are."""
    tables = cache.metadata.block_tables
    return *row_places(cache.rows), tables.data_ptr(), tables.stride(0), cache.metadata.block_size


def step_sequences(metadata: AttentionMetadata) -> tuple[int, ...]:
    """Where their tokens begin, how long they are, and how many."""
    return metadata.query_start.data_ptr(), metadata.seq_lens.data_ptr(), metadata.seq_lens.shape[0]
