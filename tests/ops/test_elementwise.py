"""scale_add and soft_cap: values, and rows that do not depend on their neighbours."""

from __future__ import annotations

import pytest
import torch

from tests.ops.implementations import assert_close, assert_rows_alone, implementations_of, ops, rand, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("implementation", implementations_of("scale_add"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 1000])
def test_scale_add_rounds_once(implementation: str, dtype: torch.dtype, size: int) -> None:
    x, residual = rand(13, size, dtype=dtype), rand(13, size, seed=1, dtype=dtype)
    assert torch.equal(run(implementation, "scale_add", x, 1.0, residual), x + residual)
    assert torch.equal(run(implementation, "scale_add", x, 5.65625), (x.double() * 5.65625).to(dtype))
    assert_close(run(implementation, "scale_add", x, -3.0, residual), (x.double() * -3 + residual.double()).to(dtype))


@pytest.mark.parametrize("implementation", implementations_of("soft_cap"))
def test_soft_cap_is_a_scaled_tanh(implementation: str) -> None:
    logits = rand(13, 20_011) * 40
    logits[0, :5] = torch.tensor([0.0, 1e-6, -3e4, 3e4, -torch.inf])

    def capped(rows: slice) -> torch.Tensor:
        part = logits[rows].clone()
        ops(implementation)["soft_cap"](part, 30.0)
        return part

    expected = 30 * torch.tanh(logits.double() / 30)
    assert (capped(slice(0, 13)).double() - expected).abs().max() < 1e-5
    assert_rows_alone(capped, 13)
