"""Kernels run in Triton's interpreter on CPU tensors, or on a GPU where TRITON_INTERPRET=0 says so."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined


@pytest.fixture(autouse=True)
def _numbers_may_overflow() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where a GPU gives infinity or NaN."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _interpreted(triton_interpreter: None) -> None:
    """All kernels here are."""
