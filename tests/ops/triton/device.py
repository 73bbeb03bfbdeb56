"""Where the kernels under test run."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor

from tests.ops.implementations import rand

INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
if INTERPRETED and "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    pytest.skip("triton was imported to compile; run these tests in a process of their own", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("TRITON_INTERPRET=0 asks for a GPU, and there is none", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def randoms(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `rand`, on the device under test."""
    return rand(*shape, seed=seed, dtype=dtype).to(DEVICE)
