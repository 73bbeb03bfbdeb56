"""Every family with weights rounded to int8 and int4: close to what it is without, and no row notices another."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.ops.backends import ops_of
from tests.engine.test_parity import available_ops
from tests.family_configs import FAMILIES
from tests.models.harness import Harness

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="the native kernels are not built")
LIMITS = {"int8": 0.12, "int4": 0.9}
"""Error of a middling token's logits, as a share of their spread; 1.4 for logits of another model."""
LENGTHS = (3, 30)


def prompt(length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def error(logits: Tensor, exact: Tensor) -> float:
    """Of the middle token: where a rounding error chooses other experts, logits are others."""
    return ((logits - exact).norm(dim=1) / (exact - exact.mean(dim=1, keepdim=True)).norm(dim=1)).median().item()


@cache
def unrounded(directory: Path) -> Tensor:
    """Logits of the longest prompt. Shapes: -> [T, V]."""
    return Harness(ops_of("cpu"), directory, dtype=torch.bfloat16).logits(prompt(max(LENGTHS)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", LIMITS)
def test_rounded_weights_change_little_and_no_row_notices_another(
    checkpoint: Callable[..., Path], family: str, quantization: str
) -> None:
    directory, prompts = checkpoint(family), [prompt(length) for length in LENGTHS]
    harness = Harness(ops_of("cpu"), directory, dtype=torch.bfloat16, quantization=quantization)
    alone = [harness.logits(token_ids) for token_ids in prompts]
    assert error(alone[1], unrounded(directory)) < LIMITS[quantization]
    assert torch.equal(harness.logits(prompts[1], chunk=7), alone[1])
    rows = [harness.add(token_ids) for token_ids in prompts]
    together = harness.step([(row, len(row.token_ids)) for row in rows])
    assert all(torch.equal(found, whole) for found, whole in zip(together, alone, strict=True))
