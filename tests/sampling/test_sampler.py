import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.ops.backends import ops_of
from quire.ops.contracts.ops import Ops
from quire.sampling.batch import SamplingBatch
from quire.sampling.drawn import SampledTokens
from quire.sampling.random import uniforms
from quire.sampling.row import SamplingRow
from quire.sampling.sampler import LogitsRoom, Sampler
from tests.ops.implementations import REFERENCE, implementations_of
from tests.sampling.rows import make_row

VOCAB_SIZE = 211


def sample(
    rows: Sequence[SamplingRow], logits: torch.Tensor, num_draws: Sequence[int] | None = None, ops: Ops = REFERENCE
) -> SampledTokens:
    batch = SamplingBatch(rows, logits.shape[-1], ops)
    return Sampler(ops, logits.shape[-1], 64).sample(logits.clone(), batch, num_draws or [1] * len(rows))


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


def mixed_rows() -> list[SamplingRow]:
    """One row of every kind."""
    return [
        make_row(seed=1),
        make_row(temperature=0.0),
        make_row(seed=2, temperature=0.7, top_p=0.9, logprobs=3),
        make_row(seed=3, top_k=5, branch=2),
        make_row(seed=4, min_p=0.05, allowed_token_ids=[1, 2, 3, 4]),
        make_row(temperature=0.0, output=[8, 9], repetition_penalty=1.3, logprobs=0),
        make_row(seed=5, output=[8, 9, 8], frequency_penalty=1.0, bad_words_token_ids=((7,), (8, 9))),
        make_row(seed=6, min_tokens=2, eos_token_ids=(0,), logit_bias={0: 100.0}, logprobs=-1),
    ]


def test_a_greedy_row_takes_the_most_likely_token() -> None:
    logits = random_logits(3)
    rows = [make_row(temperature=0.0) for _ in range(3)]
    assert sample(rows, logits).token_ids == [[token] for token in logits.argmax(dim=-1).tolist()]


def test_all_branches_of_a_greedy_fork_get_the_same_token() -> None:
    logits = random_logits(2)
    rows = [make_row(temperature=0.0), make_row(temperature=0.0)]
    best = logits.argmax(dim=-1).tolist()
    assert sample(rows, logits, [3, 1]).token_ids == [[best[0]] * 3, [best[1]]]


def test_a_row_draws_the_same_whatever_stands_beside_it() -> None:
    rows, logits = mixed_rows(), random_logits(8)
    together = sample(rows, logits)
    for index, row in enumerate(rows):
        alone = sample([row], logits[index : index + 1])
        assert alone.token_ids[0] == together.token_ids[index]
        assert alone.logprobs[0] == together.logprobs[index]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(order=st.permutations(range(8)), keep=st.integers(1, 8))
def test_rows_may_come_in_any_order_and_number(order: list[int], keep: int) -> None:
    rows, logits = mixed_rows(), random_logits(8)
    expected = sample(rows, logits)
    order = order[:keep]
    found = sample([rows[index] for index in order], logits[order])
    assert found.token_ids == [expected.token_ids[index] for index in order]
    assert found.logprobs == [expected.logprobs[index] for index in order]


def test_a_fork_draws_what_its_branches_would_draw_alone() -> None:
    logits = random_logits(2)
    forked = sample([make_row(seed=9), make_row(seed=10)], logits, [5, 2]).token_ids
    for row, seed in enumerate((9, 10)):
        branches = [make_row(seed=seed, branch=branch) for branch in range(5)]
        alone = sample(branches, logits[row].repeat(5, 1)).token_ids
        assert forked[row] == [tokens[0] for tokens in alone][: len(forked[row])]
    assert len(set(forked[0])) > 1


def test_a_draw_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    tokens = {
        (seed, length): sample([make_row(seed=seed, output=[0] * length)], logits).token_ids[0][0]
        for seed in range(5)
        for length in range(5)
    }
    assert len(set(tokens.values())) > 15


def test_the_position_is_the_index_of_the_token_that_is_drawn() -> None:
    row = make_row(prompt=[1, 2], output=[3], seed=77, branch=4)
    (token,) = sample([row], torch.zeros(1, 256)).token_ids[0]
    assert token == int(uniforms(77, 4, 3) * 256)


def test_a_preempted_row_draws_on_as_if_nothing_had_happened() -> None:
    logits = random_logits(1)
    row = make_row(seed=3, repetition_penalty=1.2)
    for _ in range(4):
        row.append(sample([row], logits).token_ids[0][0])
    rebuilt = make_row(seed=3, repetition_penalty=1.2, output=row.token_ids[3:])
    assert sample([rebuilt], logits).token_ids == sample([row], logits).token_ids


def test_a_batch_is_reused_while_its_rows_grow() -> None:
    rows = mixed_rows()
    batch, sampler = SamplingBatch(rows, VOCAB_SIZE, REFERENCE), Sampler(REFERENCE, VOCAB_SIZE, 64)
    for step in range(6):
        logits = random_logits(8, seed=step)
        expected = sample(rows, logits)
        assert sampler.sample(logits, batch, [1] * 8) == expected
        for row, tokens in zip(rows, expected.token_ids, strict=True):
            row.append(tokens[0])


def test_logprobs_come_from_the_models_own_logits() -> None:
    row = make_row(seed=1, temperature=0.3, allowed_token_ids=[4, 5], logit_bias={4: 5.0}, logprobs=2)
    logits = random_logits(1)
    sampled = sample([row], logits)
    expected = torch.log_softmax(logits[0], dim=-1)
    (position,) = sampled.logprobs[0] or []
    assert position.token_ids[0] == sampled.token_ids[0][0]
    assert position.token_ids[1:] == logits[0].topk(2).indices.tolist()
    assert position.logprobs == expected[position.token_ids].tolist()


def test_each_branch_of_a_fork_has_its_own_logprobs() -> None:
    logits = random_logits(3)
    sampled = sample([make_row(), make_row(seed=2, logprobs=1), make_row(logprobs=0)], logits, [1, 4, 1])
    assert sampled.logprobs[0] is None
    positions = sampled.logprobs[1] or []
    assert [position.token_ids[0] for position in positions] == sampled.token_ids[1]
    expected = torch.log_softmax(logits[1], dim=-1)
    assert [position.logprobs[0] for position in positions] == expected[sampled.token_ids[1]].tolist()
    assert len(sampled.logprobs[2] or []) == 1


def test_columns_that_pad_the_head_are_never_drawn() -> None:
    logits = torch.zeros(2, 20)
    logits[:, 16:] = 1000.0
    rows = [make_row(temperature=0.0), make_row(seed=1)]
    tokens = Sampler(REFERENCE, 16, 64).sample(logits, SamplingBatch(rows, 16, REFERENCE), [1, 50]).token_ids
    assert max(tokens[0] + tokens[1]) < 16


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_whose_logits_are_not_finite_fails_alone(value: float) -> None:
    rows, logits = mixed_rows(), random_logits(8)
    expected = sample(rows, logits)
    for broken in range(8):
        damaged = logits.clone()
        if value == -math.inf:
            damaged[broken] = value
        else:
            damaged[broken, 17] = value
        found = sample(rows, damaged)
        assert list(found.errors) == [broken]
        assert "not finite" in found.errors[broken].message
        assert found.token_ids[broken] == []
        others = [index for index in range(8) if index != broken]
        assert [found.token_ids[index] for index in others] == [expected.token_ids[index] for index in others]
        assert [found.logprobs[index] for index in others] == [expected.logprobs[index] for index in others]


def test_single_tokens_of_minus_infinity_are_no_error() -> None:
    logits = random_logits(1)
    logits[0, :200] = -math.inf
    found = sample([make_row(seed=1)], logits, [50])
    assert found.errors == {}
    assert min(found.token_ids[0]) >= 200


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_every_token_is_excluded_fails_and_names_the_parameters(temperature: float) -> None:
    hopeless = make_row(temperature=temperature, allowed_token_ids=[3, 4], bad_words_token_ids=((3,), (4,)), logprobs=1)
    healthy = make_row(seed=2, temperature=temperature)
    found = sample([hopeless, healthy], random_logits(2))
    assert list(found.errors) == [0]
    assert "allowed_token_ids, bad_words" in found.errors[0].message
    assert found.token_ids[0] == []
    assert found.logprobs[0] is None
    assert found.token_ids[1] == sample([healthy], random_logits(2)[1:]).token_ids[0]


def test_a_row_that_overflows_under_its_penalty_fails_and_names_it() -> None:
    row = make_row(prompt=[1], repetition_penalty=0.001)
    logits = random_logits(1)
    logits[0, 1] = 1e38
    found = sample([row], logits)
    assert "overflow" in found.errors[0].message
    assert "repetition_penalty" in found.errors[0].message


def test_the_batch_says_what_it_needs() -> None:
    plain = SamplingBatch([make_row(temperature=0.0)] * 2, VOCAB_SIZE, REFERENCE)
    assert (plain.all_greedy, plain.needs_penalties, plain.max_logprobs) == (True, False, None)
    mixed = SamplingBatch(mixed_rows(), VOCAB_SIZE, REFERENCE)
    assert (mixed.all_greedy, mixed.needs_penalties, mixed.max_logprobs) == (False, True, VOCAB_SIZE)
    assert SamplingBatch([make_row(logprobs=3), make_row(logprobs=0)], VOCAB_SIZE, REFERENCE).max_logprobs == 3


def test_logits_of_a_model_in_inference_mode_can_be_changed() -> None:
    with torch.inference_mode():
        logits = random_logits(1) + 0.0
    batch = SamplingBatch([make_row(temperature=0.0, allowed_token_ids=[5])], VOCAB_SIZE, REFERENCE)
    assert Sampler(REFERENCE, VOCAB_SIZE, 64).sample(logits, batch, [1]).token_ids == [[5]]


@pytest.mark.parametrize("implementation", implementations_of("row_max"))
def test_columns_beyond_the_vocabulary_are_not_looked_at(implementation: str) -> None:
    ops = ops_of(implementation)
    rows, logits = mixed_rows(), random_logits(8)
    padded = torch.cat((logits, torch.full((8, 5), math.nan)), dim=1)
    batch = SamplingBatch(rows, VOCAB_SIZE, ops)
    assert Sampler(ops, VOCAB_SIZE, 64).sample(padded, batch, [1] * 8) == sample(rows, logits, ops=ops)


def test_copies_of_logits_of_any_number_of_rows_are_made_in_one_place() -> None:
    room, logits = LogitsRoom(REFERENCE, VOCAB_SIZE, 8), random_logits(8)
    places = set()
    for rows in ([1, 3], [7], [0, 0, 2, 5, 5, 6], list(range(8))):
        copied = room.copy(logits, rows)
        assert torch.equal(copied, logits[rows])
        places.add(copied.data_ptr())
    assert len(places) == 1


def test_an_empty_batch_gives_nothing() -> None:
    assert sample([], torch.empty(0, VOCAB_SIZE)) == SampledTokens([], [], {})
