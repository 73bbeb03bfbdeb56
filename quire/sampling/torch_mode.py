"""How torch computes inside a step, where it does: a step of ops alone must not pay for setting this up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.ops.threads import one_thread


@contextmanager
def torch_mode() -> Iterator[None]:
    """One thread, no autograd, and any tensor may change."""
    with one_thread(), torch.inference_mode():
        yield
