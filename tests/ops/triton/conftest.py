"""Kernels run in Triton's interpreter on CPU tensors, or on a GPU where TRITON_INTERPRET=0 says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from types import FunctionType

import numpy as np
import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined


@pytest.fixture(autouse=True)
def _numbers_may_overflow() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where a GPU gives infinity or NaN."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _prepare_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter exchanges Triton's language at each call of a function, which is nine tenths of the time.

    Once a launch is enough: the language is exchanged already if its builtins are none.
    """
    if find_spec("triton") is None or os.environ["TRITON_INTERPRET"] != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang

    def prepare_once(function: FunctionType) -> object:
        seen = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        is_ready = not any(tl.core.is_builtin(module.load) for module in seen)
        return interpreter._LangPatchScope() if is_ready else prepare(function)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
