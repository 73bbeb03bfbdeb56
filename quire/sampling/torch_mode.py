"""How torch computes inside a step, where it does: a step of ops alone must not pay for setting this up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_mode() -> Iterator[None]:
    """No autograd, any tensor may change, and one thread: a sum that torch splits would change with their number."""
    num_threads = torch.get_num_threads()
    if num_threads != 1:
        torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield
    finally:
        if num_threads != 1:
            torch.set_num_threads(num_threads)
