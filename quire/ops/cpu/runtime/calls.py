"""Ops that are no single function of the library, run at once or noted for a graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from quire.ops.cpu.library import is_recording, note_call
from quire.ops.cpu.runtime.memory import untracked
from quire.ops.threads import one_thread


def run_or_note(function: Callable[..., None], *tensors: Tensor | None) -> None:
    """Call a function of tensors that it reads or writes, or, while this thread records, have graphs call it."""
    if not is_recording():
        _run(function, *tensors)
        return
    given = [None if tensor is None else untracked(tensor) for tensor in tensors]
    note_call(partial(_run, function, *given), [tensor.data_ptr() for tensor in given if tensor is not None])


def _run(function: Callable[..., None], *tensors: Tensor | None) -> None:
    with one_thread(), torch.inference_mode():
        function(*tensors)
