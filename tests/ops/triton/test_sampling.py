"""The sampler's kernels: the integers of the contract, chunk by chunk."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.ops.reference import sampling as reference
from tests.ops.test_allowed_tokens import SETTINGS, case
from tests.ops.test_sampling import CASES, naive_sample, parameters
from tests.ops.triton.device import DEVICE, randoms

from quire.ops.triton import sampling  # isort: skip  (device decides whether Triton can be imported)

CHUNK = sampling.CHUNK


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of some hundred tokens take several chunks."""
    monkeypatch.setattr(sampling, "CHUNK", 64)


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def draw(logits: Tensor, rows: list[tuple[float, int, float, float]], numbers: Tensor, *masks: Tensor) -> Tensor:
    return sampling.sample(*on_device(logits, *parameters(rows), numbers, *masks)).cpu()


def numbers_of(rows: int, draws: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, draws, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


few = st.sampled_from([-math.inf, -3.0, -0.0, 0.0, 0.5, 2.0])  # makes ties
logits_of_row = st.lists(few | st.floats(-30, 30, width=32, allow_subnormal=False), min_size=110, max_size=110)
settings_of_row = st.tuples(
    st.sampled_from([0.125, 0.5, 1.0, 2.0]),
    st.integers(0, 112),
    st.just(1.0) | st.sampled_from([0.001, 0.25, 0.5, 0.875, 0.99]),
    st.sampled_from([0.0, 0.0, 0.25, 0.001]),
)


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(row=logits_of_row.filter(lambda row: max(row) > -math.inf), setting=settings_of_row, seed=st.integers(0, 99))
def test_sample_equals_the_contract_written_out(
    row: list[float], setting: tuple[float, int, float, float], seed: int
) -> None:
    numbers = numbers_of(1, 2, seed)
    drawn = draw(torch.tensor([row]), [setting], numbers)
    exact = [float(torch.tensor(value)) if isinstance(value, float) else value for value in setting]
    assert drawn[0].tolist() == [naive_sample(row, *exact, uniform) for uniform in numbers[0].tolist()]


def test_sample_draws_what_the_reference_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", 512)
    logits, numbers = randoms(len(CASES), 1001).cpu() * 2, numbers_of(len(CASES), 2)
    numbers[:, 0] = math.nextafter(1, 0)
    assert torch.equal(draw(logits, CASES, numbers), reference.sample(logits, *parameters(CASES), numbers))


def test_a_cut_among_equal_tokens_keeps_the_lower_ids_of_all_chunks() -> None:
    logits = torch.zeros(3, 300)
    rows = [(1.0, 130, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 200, 0.25, 0.0)]
    last = torch.full((3, 1), math.nextafter(1, 0), dtype=torch.float64)
    assert draw(logits, rows, last).tolist() == [[129], [149], [49]]


def test_top_k_beyond_the_tokens_that_have_a_weight_keeps_them_all() -> None:
    logits = torch.full((1, 200), -1e4)
    logits[0, [3, 150]] = 1.0
    numbers = torch.tensor([[0.0, 0.99]], dtype=torch.float64)
    assert draw(logits, [(1.0, 100, 0.999, 0.0)], numbers).tolist() == [[3, 150]]


def test_sample_reads_only_its_row() -> None:
    logits, numbers = randoms(len(CASES), 99).cpu() * 3, numbers_of(len(CASES), 1)
    together = draw(logits, CASES, numbers)
    for row in (0, 3):
        own = slice(row, row + 1)
        assert torch.equal(draw(logits[own].clone(), CASES[own], numbers[own]), together[own])


def test_sample_takes_no_rows() -> None:
    drawn = sampling.sample(*on_device(torch.empty(0, 50), *(torch.empty(0),) * 4, torch.empty(0, 2).double()))
    assert drawn.shape == (0, 2)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_mask_is_as_if_what_it_leaves_out_were_impossible(share: float) -> None:
    logits, mask_of, masks, expected = case(171, share)
    numbers = numbers_of(5, 2)
    drawn = draw(logits, SETTINGS, numbers, mask_of, masks)
    assert torch.equal(drawn, reference.sample(expected, *parameters(SETTINGS), numbers))
    rows = torch.tensor([2, 4, 0])
    found = sampling.allowed_max(*on_device(logits, rows, masks))
    assert found == reference.allowed_max(logits, rows, masks)


def test_a_row_that_is_allowed_nothing_draws_the_first_token() -> None:
    logits, masks = randoms(2, 70).cpu(), torch.zeros(1, 3, dtype=torch.int32)
    assert sampling.allowed_max(*on_device(logits, torch.tensor([1]), masks)) == ([-torch.inf], [0])
    drawn = draw(logits, [SETTINGS[1]] * 2, numbers_of(2, 2), torch.tensor([-1, 0]), masks)
    assert drawn[1].tolist() == [0, 0]
    assert torch.equal(drawn[:1], draw(logits[:1], [SETTINGS[1]], numbers_of(2, 2)[:1]))


@pytest.mark.parametrize("vocab_size", [1, 64, 333])
def test_row_max_takes_the_lowest_of_equal_tokens_and_nan_first(vocab_size: int) -> None:
    logits = torch.randint(-3, 3, (5, vocab_size), generator=torch.Generator().manual_seed(3)).float()
    logits[logits == 0] = -0.0
    assert sampling.row_max(logits.to(DEVICE)) == reference.row_max(logits)
    logits[3, vocab_size // 2 :] = math.nan
    values, ids = sampling.row_max(logits.to(DEVICE))
    assert (ids[3], [math.isnan(value) for value in values]) == (vocab_size // 2, [row == 3 for row in range(5)])


def test_row_max_takes_the_chunk_that_it_is_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", CHUNK)
    logits = randoms(2, CHUNK + 5).cpu()
    logits[0, CHUNK + 4] = logits[1, CHUNK] = 100.0
    assert sampling.row_max(logits.to(DEVICE)) == ([100.0, 100.0], [CHUNK + 4, CHUNK])


@pytest.mark.parametrize("k", [0, 1, 20, 333])
def test_top_logprobs_orders_by_logit_then_id(k: int) -> None:
    """Tolerance 1e-5: float32 sums of exponentials in another order than torch's."""
    logits = torch.randint(-8, 8, (6, 333), generator=torch.Generator().manual_seed(4)).float() / 2
    logits[2, :100] = -math.inf
    chosen = torch.tensor([0, 5, 332, 17, 100, 200])
    expected = reference.top_logprobs(logits, chosen, k)
    actual = [part.cpu() for part in sampling.top_logprobs(*on_device(logits, chosen), k)]
    assert torch.equal(actual[1], expected[1])
    assert torch.equal(actual[2], expected[2])
    assert torch.allclose(actual[0], expected[0], atol=1e-5)
    assert torch.allclose(actual[3], expected[3], atol=1e-5)


def test_top_logprobs_reads_only_its_row() -> None:
    logits, chosen = randoms(5, 501) * 4, torch.arange(5, device=DEVICE) * 100
    together = sampling.top_logprobs(logits, chosen, 20)
    logits[3] = math.nan
    for row in (0, 4):
        alone = sampling.top_logprobs(logits[row : row + 1].clone(), chosen[row : row + 1], 20)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


def test_penalties_have_the_bits_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(4, 50, generator=generator)
    penalties = torch.tensor([[1.3, 1.0, 0.7, 2.0], [0.5, -1.0, 0.0, 2.0], [0.2, 0.1, -0.3, 0.0]])
    token_ids = torch.cat([torch.randperm(50, generator=generator)[:10] for _ in range(4)])
    counts = torch.randint(0, 4, (40,), generator=generator)
    in_prompt = torch.rand(40, generator=generator) < 0.5
    pairs = (torch.arange(4).repeat_interleave(10), token_ids, in_prompt, counts)
    actual = logits.to(DEVICE, copy=True)
    sampling.apply_penalties(actual, *on_device(*pairs, *penalties))
    reference.apply_penalties(logits, *pairs, *penalties)
    assert torch.equal(actual.cpu(), logits)


def test_penalties_of_no_pairs_change_nothing() -> None:
    logits = randoms(2, 10)
    before, none = logits.clone(), torch.empty(0, dtype=torch.int64, device=DEVICE)
    sampling.apply_penalties(logits, none, none, none.bool(), none, *(torch.ones(2, device=DEVICE),) * 3)
    assert torch.equal(logits, before)
