"""row_max, top_logprobs, apply_penalties and sample, for every implementation that provides them."""

import importlib
import importlib.util
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.ops import backends


def implementations_of(op: str) -> list[str]:
    """Names of the implementations that bring this op and run on this machine."""
    names = []
    for name in backends.ON_CPU:
        package = backends.IMPLEMENTATIONS[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # absent, or a folder without an __init__
            continue
        try:
            backends.implementation_of(name)
        except ConfigError:
            continue
        if op in importlib.import_module(package).OPS:
            names.append(name)
    return names


def run(impl: str, op: str, *args: object):
    return backends.implementation_of(impl)[op](*args)


def parameters(rows: Sequence[tuple[float, int, float, float]]) -> tuple[torch.Tensor, ...]:
    """(temperature, top_k, top_p, min_p) for each row, as tensors."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p)


def naive_sample(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """One draw, word for word as the contract has it, in Python numbers."""
    largest = max(logits)
    weights = [round(2**40 * math.exp((logit - largest) / temperature)) for logit in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    kept = [i for i in order if weights[i] >= min_p * 2**40]
    kept = kept[:top_k] if top_k else kept
    if top_p < 1:
        share, reached = math.ceil(top_p * float(sum(weights[i] for i in kept))), 0
        for count, i in enumerate(kept, start=1):
            reached += weights[i]
            if reached >= share:
                kept = kept[:count]
                break
    total = sum(weights[i] for i in kept)
    target, reached = min(math.floor(uniform * float(total)), total - 1), 0
    for i in sorted(kept):
        reached += weights[i]
        if reached > target:
            return i
    raise AssertionError("the running sum ends above every target")


def float32(low: float, high: float, **options: bool) -> st.SearchStrategy[float]:
    bounds = (float(np.float32(low)), float(np.float32(high)))
    return st.floats(*bounds, width=32, allow_nan=False, allow_subnormal=False, **options)


@pytest.mark.parametrize("impl", implementations_of("sample"))
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_sample_equals_the_contract_written_out(impl: str, data: st.DataObject) -> None:
    vocab_size = data.draw(st.integers(1, 40))
    few = st.sampled_from([-math.inf, -3.0, -0.0, 0.0, 0.5, 2.0])  # makes ties
    rows = data.draw(
        st.lists(
            st.lists(few | float32(-30, 30), min_size=vocab_size, max_size=vocab_size).filter(
                lambda row: max(row) > -math.inf
            ),
            min_size=1,
            max_size=4,
        )
    )
    settings_of_row = st.tuples(
        float32(0.01, 2),
        st.integers(0, vocab_size + 2),
        st.just(1.0) | float32(1e-3, 1),
        st.just(0.0) | float32(0, 1),
    )
    given_settings = data.draw(st.lists(settings_of_row, min_size=len(rows), max_size=len(rows)))
    numbers = data.draw(
        st.lists(
            st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=2), min_size=len(rows), max_size=len(rows)
        )
    )
    drawn = run(
        impl, "sample", torch.tensor(rows), *parameters(given_settings), torch.tensor(numbers, dtype=torch.float64)
    )
    expected = [
        [naive_sample(row, *setting, uniform) for uniform in uniforms]
        for row, setting, uniforms in zip(rows, given_settings, numbers, strict=True)
    ]
    assert drawn.tolist() == expected


CASES = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 50, 1.0, 0.0),
    (0.8, 40, 0.95, 0.05),
    (2.0, 0, 0.999, 0.0),
    (1.0, 1500, 0.9, 0.0),
    (0.5, 1, 1.0, 0.0),
    (1.0, 0, 1.0, 0.3),
]


@pytest.mark.parametrize("impl", implementations_of("sample"))
def test_sample_equals_the_contract_at_larger_vocabularies(impl: str) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(CASES), 3001, generator=generator)  # flat: a nucleus of more than a thousand tokens
    numbers = torch.rand(len(CASES), 5, generator=generator, dtype=torch.float64)
    drawn = run(impl, "sample", logits, *parameters(CASES), numbers)
    for row, case in enumerate(CASES):
        exact = [float(np.float32(value)) if isinstance(value, float) else value for value in case]
        assert drawn[row].tolist() == [naive_sample(logits[row].tolist(), *exact, u) for u in numbers[row].tolist()]


@pytest.mark.parametrize("impl", implementations_of("sample"))
def test_sample_reads_only_its_row(impl: str) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(24, 4099, generator=generator) * 3  # odd width: rows start at every alignment
    cases = [CASES[row % len(CASES)] for row in range(24)]
    numbers = torch.rand(24, 200, generator=generator, dtype=torch.float64)
    together = run(impl, "sample", logits, *parameters(cases), numbers)
    for row in range(24):
        alone = run(
            impl, "sample", logits[row : row + 1].clone(), *parameters(cases[row : row + 1]), numbers[row : row + 1]
        )
        assert torch.equal(alone[0], together[row])


@pytest.fixture
def restored_thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restored_thread_count")
@pytest.mark.parametrize("impl", implementations_of("sample"))
def test_results_do_not_depend_on_the_number_of_threads(impl: str) -> None:
    logits = torch.randn(8, 30_011, generator=torch.Generator().manual_seed(8)) * 4
    numbers = torch.rand(8, 50, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    chosen = torch.arange(8)
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        drawn = run(impl, "sample", logits, *parameters(CASES), numbers)
        found = [drawn, *run(impl, "top_logprobs", logits, chosen, 20)]
        results.append([*(tensor.tolist() for tensor in found), backends.implementation_of(impl)["row_max"](logits)])
    assert results[0] == results[1]


@pytest.mark.parametrize("impl", implementations_of("sample"))
def test_sample_leaves_its_inputs_alone(impl: str) -> None:
    logits = torch.randn(len(CASES), 64)
    before = logits.clone()
    run(impl, "sample", logits, *parameters(CASES), torch.rand(len(CASES), 2).double())
    assert torch.equal(logits, before)


@pytest.mark.parametrize("impl", implementations_of("sample"))
def test_the_largest_uniform_still_draws_a_token_that_was_kept(impl: str) -> None:
    logits = torch.zeros(1, 20_000)  # the sum of weights exceeds 2**53, where float64 rounds
    last = math.nextafter(1, 0)
    drawn = run(
        impl, "sample", logits, *parameters([(1.0, 19_999, 1.0, 0.0)]), torch.tensor([[0.0, last]], dtype=torch.float64)
    )
    assert drawn.tolist() == [[0, 19_998]]


@pytest.mark.parametrize("impl", implementations_of("sample"))
@pytest.mark.parametrize("seed", range(4))
def test_a_sum_that_float64_rounds_does_not_undo_top_k(impl: str, seed: int) -> None:
    logits = torch.rand(1, 20_001, generator=torch.Generator().manual_seed(seed)) / 10
    logits[0, -1] = -0.1  # the one token that top-k drops, and the last that a draw comes to
    last = torch.tensor([[math.nextafter(1, 0)]], dtype=torch.float64)
    assert run(impl, "sample", logits, *parameters([(1.0, 20_000, 1.0, 0.0)]), last).tolist() == [[19_999]]


@pytest.mark.parametrize("impl", implementations_of("sample"))
def test_top_p_takes_one_more_token_when_a_fraction_of_a_weight_is_missing(impl: str) -> None:
    logits = torch.tensor([[0.0, -2.3841848815209232e-06]])  # top_p * total is 2**40 + 0.4375: just above one token
    last = torch.tensor([[0.999]], dtype=torch.float64)
    drawn = run(impl, "sample", logits, *parameters([(1.0, 0, 0.5000005960464478, 0.0)]), last)
    assert drawn.tolist() == [[1]]


@pytest.mark.parametrize("impl", implementations_of("sample"))
def test_top_k_of_one_is_greedy_and_ties_go_to_the_lower_id(impl: str) -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 4.0]])
    numbers = torch.linspace(0, 0.999, 50).double().unsqueeze(0)
    drawn = run(impl, "sample", logits, *parameters([(1.5, 1, 1.0, 0.0)]), numbers)
    assert set(drawn[0].tolist()) == {1}


@pytest.mark.parametrize("impl", implementations_of("row_max"))
def test_row_max_takes_the_lowest_of_equal_tokens(impl: str) -> None:
    logits = torch.full((3, 1000), -1.0)
    logits[0, [700, 300, 999]] = 5.0
    logits[1, :] = 0.0
    logits[2, 998] = -0.5
    assert backends.implementation_of(impl)["row_max"](logits)[1] == [300, 0, 998]


@pytest.mark.parametrize("impl", implementations_of("row_max"))
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1023])
def test_row_max_equals_a_loop(impl: str, vocab_size: int) -> None:
    logits = torch.randint(-3, 3, (9, vocab_size), generator=torch.Generator().manual_seed(3)).float()
    values, ids = backends.implementation_of(impl)["row_max"](logits)
    assert ids == [row.index(max(row)) for row in logits.tolist()]
    assert values == [max(row) for row in logits.tolist()]
    logits[4, vocab_size // 2] = math.nan
    values, ids = backends.implementation_of(impl)["row_max"](logits)
    assert [tensor.tolist() for tensor in backends.implementation_of(impl)["row_max_tensors"](logits)][1] == ids
    assert (ids[4], [math.isnan(value) for value in values]) == (vocab_size // 2, [row == 4 for row in range(9)])


def ordered(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


@pytest.mark.parametrize("impl", implementations_of("top_logprobs"))
@pytest.mark.parametrize("k", [0, 1, 5, 20, 333])
def test_top_logprobs_orders_by_logit_then_id(impl: str, k: int) -> None:
    logits = torch.randint(-8, 8, (6, 333), generator=torch.Generator().manual_seed(4)).float() / 2
    chosen = torch.tensor([0, 5, 332, 17, 100, 200])
    chosen_logprobs, ranks, top_ids, top = run(impl, "top_logprobs", logits, chosen, k)
    exact = torch.log_softmax(logits.double(), dim=-1)
    for row in range(6):
        order = ordered(logits[row].tolist())
        assert top_ids[row].tolist() == order[:k]
        assert ranks[row] == order.index(int(chosen[row])) + 1
        assert chosen_logprobs[row] == pytest.approx(float(exact[row, chosen[row]]), abs=1e-5)
    assert torch.allclose(top.double(), exact.gather(-1, top_ids), atol=1e-5)
    assert (top.dtype, chosen_logprobs.dtype, top_ids.dtype, ranks.dtype) == (torch.float32,) * 2 + (torch.int64,) * 2


@pytest.mark.parametrize("impl", implementations_of("top_logprobs"))
def test_the_most_likely_token_has_rank_one_even_where_float32_logprobs_are_equal(impl: str) -> None:
    logits = torch.zeros(1, 100_000)
    logits[0, 777] = 1e-7  # all but lost in a log-probability of -11.5
    _, ranks, top_ids, _ = run(impl, "top_logprobs", logits, torch.tensor([777]), 3)
    assert ranks.tolist() == [1]
    assert top_ids.tolist() == [[777, 0, 1]]


@pytest.mark.parametrize("impl", implementations_of("top_logprobs"))
def test_minus_zero_ties_with_zero(impl: str) -> None:
    _, ranks, top_ids, _ = run(impl, "top_logprobs", torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), torch.tensor([2]), 4)
    assert ranks.tolist() == [3]
    assert top_ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("impl", implementations_of("top_logprobs"))
def test_top_logprobs_reads_only_its_row(impl: str) -> None:
    logits = torch.randn(20, 5003, generator=torch.Generator().manual_seed(5)) * 4
    chosen = torch.arange(20) * 250
    together = run(impl, "top_logprobs", logits, chosen, 20)
    for row in range(20):
        alone = run(impl, "top_logprobs", logits[row : row + 1].clone(), chosen[row : row + 1], 20)
        assert all(torch.equal(one[0], many[row]) for one, many in zip(alone, together, strict=True))


@pytest.mark.parametrize("impl", implementations_of("apply_penalties"))
def test_penalties_equal_a_loop(impl: str) -> None:
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(4, 50, generator=generator)
    repetition, presence, frequency = torch.tensor([[1.3, 1.0, 0.7, 2.0], [0.5, -1.0, 0.0, 2.0], [0.2, 0.1, -0.3, 0.0]])
    rows = torch.arange(4).repeat_interleave(10)
    token_ids = torch.cat([torch.randperm(50, generator=generator)[:10] for _ in range(4)])
    counts = torch.randint(0, 4, (40,), generator=generator)
    in_prompt = torch.rand(40, generator=generator) < 0.5
    expected = logits.clone()
    for row, token, count, prompt in zip(rows, token_ids, counts, in_prompt, strict=True):
        value = expected[row, token]
        if prompt or count > 0:
            value = value / repetition[row] if value > 0 else value * repetition[row]
        expected[row, token] = value - frequency[row] * count - presence[row] * (count > 0)
    run(impl, "apply_penalties", logits, rows, token_ids, in_prompt, counts, repetition, presence, frequency)
    assert torch.allclose(logits, expected, rtol=1e-6, atol=1e-6)
