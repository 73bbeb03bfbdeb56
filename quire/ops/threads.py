"""One intra-op thread for torch, whose sums would otherwise be split by their number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Set torch's intra-op threads to one, around a block or, as `@one_thread()`, an op.

    BLAS splits a long sum between its threads, so bits would follow their number. Where there is one thread anyway this
    costs a comparison.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
