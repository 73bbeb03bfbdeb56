"""One intra-op thread for ops whose sums would otherwise be split by thread count."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def one_thread(op: Callable[P, R]) -> Callable[P, R]:
    """Run an op with torch's intra-op threads set to one.

    BLAS splits a long sum between its threads, so bits would follow their number. The worker has one thread set
    anyway; then this costs a comparison.
    """

    @wraps(op)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        threads = torch.get_num_threads()
        if threads == 1:
            return op(*args, **kwargs)
        torch.set_num_threads(1)
        try:
            return op(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return run
