"""Masks of tokens in `allowed_max` and `sample`, for every implementation that provides them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.test_sampling import implementations_of, parameters, run

SETTINGS = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.5, 0, 0.6, 0.0), (0.9, 3000, 0.9, 0.02), (1.0, 0, 1.0, 0.1)]
SIZES = [1, 31, 32, 33, 100, 4096, 151_936]


def case(vocab_size: int, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logits, the mask of each row, masks, the logits in which what is not allowed is impossible)."""
    rng = np.random.default_rng([vocab_size, int(1000 * share)])
    allowed = rng.random((3, -(-vocab_size // 32) * 32)) < share
    allowed[:, rng.integers(vocab_size)] = True
    masks = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view(np.int32))
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size)).astype(np.float32).round(1))  # with ties
    mask_of = torch.tensor([2, -1, 0, -1, 1])
    expected = logits.clone()
    for row, number in enumerate(mask_of.tolist()):
        if number >= 0:
            expected[row, torch.from_numpy(~allowed[number, :vocab_size])] = -torch.inf
    return logits, mask_of, masks, expected


@pytest.mark.parametrize("impl", implementations_of("allowed_max"))
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999, 1.0])
def test_a_mask_is_as_if_what_it_leaves_out_were_impossible(impl: str, vocab_size: int, share: float) -> None:
    logits, mask_of, masks, expected = case(vocab_size, share)
    before = logits.clone()
    rows = torch.tensor([2, 4, 0])
    values, ids = run(impl, "row_max", expected)
    assert run(impl, "allowed_max", logits, rows, masks) == ([values[i] for i in rows], [ids[i] for i in rows])
    numbers = torch.rand(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(vocab_size))
    for first in range(len(SETTINGS)):
        settings = parameters([*SETTINGS[first:], *SETTINGS[:first]])
        drawn = run(impl, "sample", logits, *settings, numbers, mask_of, masks)
        assert torch.equal(drawn, run(impl, "sample", expected, *settings, numbers))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("impl", implementations_of("allowed_max"))
def test_a_row_that_is_allowed_nothing_draws_the_first_token(impl: str) -> None:
    logits, masks = torch.randn(2, 70), torch.zeros(1, 3, dtype=torch.int32)
    assert run(impl, "allowed_max", logits, torch.tensor([1]), masks) == ([-torch.inf], [0])
    numbers = torch.full((2, 2), 0.9, dtype=torch.float64)
    drawn = run(impl, "sample", logits, *parameters([SETTINGS[0]] * 2), numbers, torch.tensor([-1, 0]), masks)
    assert drawn[1].tolist() == [0, 0]
    assert torch.equal(drawn[0], run(impl, "sample", logits[:1], *parameters([SETTINGS[0]]), numbers[:1])[0])
