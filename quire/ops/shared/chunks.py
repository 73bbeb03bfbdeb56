"""Attention within chunks of the context: each chunk of a sequence that a step touches is attended as its own sequence.

Row invariance: a chunk begins at a multiple of its size, whatever a step computes, so its tokens meet the operations of
a sequence of that length.
"""

from __future__ import annotations

import torch

from quire.ops.contracts.operands import AttentionMetadata
from quire.utils.math import cdiv


def by_chunk(metadata: AttentionMetadata, size: int) -> AttentionMetadata:
    """Where the tokens of a step lie in chunks of `size` tokens, a multiple of the block size."""
    starts, parts = metadata.query_start.tolist(), []
    for row, end in enumerate(metadata.seq_lens.tolist()):
        position = end - (starts[row + 1] - starts[row])
        while position < end:
            begin = position // size * size
            stop = min(end, begin + size)
            parts.append((row, begin // metadata.block_size, stop - position, stop - begin))
            position = stop
    widest = max((cdiv(length, metadata.block_size) for *_, length in parts), default=0)
    tables = torch.zeros(len(parts), widest, dtype=torch.int32)
    for index, (row, first, _, length) in enumerate(parts):
        count = cdiv(length, metadata.block_size)
        tables[index, :count] = metadata.block_tables[row, first : first + count]
    counts = torch.tensor([0, *(count for _, _, count, _ in parts)], dtype=torch.int32)
    return AttentionMetadata(
        query_start=counts.cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor([length for *_, length in parts], dtype=torch.int32),
        block_tables=tables,
        block_size=metadata.block_size,
    )
