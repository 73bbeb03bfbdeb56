"""How many intra-op threads torch computes with: its sums are split by their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's intra-op threads around a block. Where there are as many anyway this costs a comparison."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Set torch's intra-op threads to one, around a block or, as `@one_thread()`, an op.

    BLAS splits a long sum between its threads, so bits would follow their number.
    """
    with torch_threads(1):
        yield
