"""One step: rows, copies, forward, prompt scores, tokens. With a model whose logits are written down here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.messages.kv import kv_layout
from quire.messages.output import PositionLogprobs
from quire.messages.step import ModelRunnerOutput, NewSequenceData, SchedulerOutputs
from quire.ops.contracts.operands import Largest
from quire.sampling.row import ON_DEVICE
from quire.worker import model_runner
from quire.worker.cache_engine import CacheEngine
from quire.worker.device_link import Link
from quire.worker.model_runner import ModelRunner
from tests.fakes import specs_of
from tests.ops.implementations import REFERENCE
from tests.worker import plans
from tests.worker.links import CopyLink
from tests.worker.plans import introducing

VOCAB_SIZE, BLOCK_SIZE = 23, 4


class Successor:
    """After token t comes t + 1; the hidden state of a token is the token, its position, and its cache slot."""

    def __init__(self) -> None:
        self.num_logit_rows: list[int] = []
        self.num_largest_rows: list[int] = []
        self.slots: list[list[int]] = []

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        self.slots.append(ctx.groups[0].slot_mapping.tolist())
        return torch.stack((token_ids, ctx.positions), dim=1).float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.num_logit_rows.append(len(hidden))
        logits = torch.linspace(0, -1, VOCAB_SIZE).repeat(len(hidden), 1)
        successors = (hidden[:, 0].long() + 1) % VOCAB_SIZE
        logits[torch.arange(len(hidden)), successors] = 5.0 + hidden[:, 1] / 10  # differs from position to position
        return logits

    def largest_logits(self, hidden: Tensor) -> Largest:
        self.num_largest_rows.append(len(hidden))
        return Largest(*REFERENCE.row_max_tensors(self.compute_logits(hidden)))


@pytest.fixture
def runner() -> ModelRunner:
    return make_runner()


def make_runner(**options: Any) -> ModelRunner:
    return ModelRunner(
        REFERENCE,
        Successor(),
        CacheEngine(REFERENCE, kv_layout(specs_of(BLOCK_SIZE) * 2), 60, num_ahead=4),
        vocab_size=VOCAB_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=200,
        max_model_len=200,
        **options,
    )


def new(seq_id: int, token_ids: list[int], **params: Any) -> plans.New:
    block_ids = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    return plans.new_sequence(seq_id, token_ids, block_ids, **params)


def step(runner: ModelRunner, scheduled: list[tuple[int, int, int, int]], **fields: Any) -> ModelRunnerOutput:
    """Run (seq_id, computed, count, draws) for each sequence."""
    ids, computed, counts, num_draws = (list(column) for column in zip(*scheduled, strict=True))
    plan = SchedulerOutputs(
        seq_ids=ids, num_computed_tokens=computed, num_scheduled_tokens=counts, num_draws=num_draws, **fields
    )
    return runner.execute(plan)


def begin(runner: ModelRunner, scheduled: list[tuple[int, int, int, int]], **fields: Any) -> Callable[[], Any]:
    """The same of a step whose result is read later."""
    ids, computed, counts, num_draws = (list(column) for column in zip(*scheduled, strict=True))
    return runner.submit(
        SchedulerOutputs(
            seq_ids=ids, num_computed_tokens=computed, num_scheduled_tokens=counts, num_draws=num_draws, **fields
        )
    )


@pytest.mark.parametrize("link", [None, CopyLink()], ids=["host's memory", "memory of its own"])
def test_steps_go_on_from_tokens_that_nobody_has_read(link: Link | None) -> None:
    runner = make_runner(leaves_tokens=True, link=link)
    sampled = {"temperature": 1.0, "top_k": 1, "seed": 1}
    prompts = introducing(new(0, [1, 2, 3]), new(1, [6, 7], **sampled), new(2, [9]))
    reads = [begin(runner, [(0, 0, 3, 1), (1, 0, 2, 1), (2, 0, 1, 1)], **prompts)]
    for index in range(3):
        pending = {seq_id: first + index for seq_id, first in ((2, 1), (0, 3), (1, 2))}
        order = [(seq_id, position, 1, 1) for seq_id, position in pending.items()]
        reads.append(begin(runner, order, pending_tokens=pending))
    assert {row.drawn for row in runner.batch.rows.values()} == {ON_DEVICE}
    assert [read().token_ids for read in reads] == [
        [[4], [8], [10]], [[11], [5], [9]], [[12], [6], [10]], [[13], [7], [11]]
    ]  # fmt: skip
    again = begin(runner, [(1, 4, 1, 1)], pending_tokens={1: 4})
    assert again().token_ids == [[11]], "a step that runs again reads the token that it read before"


@pytest.mark.parametrize("params", [{"logprobs": -1}, {"repetition_penalty": 1.1}, {"n": 2}])
def test_what_needs_tokens_on_the_host_has_them(params: dict[str, Any]) -> None:
    runner = make_runner(leaves_tokens=True)
    num_draws = params.get("n", 1)
    asks = introducing(new(0, [1, 2, 3], **params), new(1, [7]))
    begin(runner, [(0, 0, 3, num_draws), (1, 0, 1, 1)], **asks)
    assert ON_DEVICE not in {row.drawn for row in runner.batch.rows.values()}


@pytest.mark.parametrize("logprobs", [(0, 3, None), (None, 2, None), (3, 1, 2)])
def test_candidates_stay_on_the_device_with_the_tokens_and_are_those_of_a_step_that_waits(
    logprobs: tuple[int | None, ...],
) -> None:
    draws = {"temperature": 1.0, "seed": 4}
    given = [([1, 2, 3], {}), ([6, 7], draws), ([9], {})]
    found = []
    for leaves in (False, True):
        runner = make_runner(leaves_tokens=leaves)
        rows = [
            new(i, prompt, logprobs=k, **params)
            for i, ((prompt, params), k) in enumerate(zip(given, logprobs, strict=True))
        ]
        read = begin(runner, [(0, 0, 3, 1), (1, 0, 2, 1), (2, 0, 1, 1)], **introducing(*rows))
        assert (ON_DEVICE in {row.drawn for row in runner.batch.rows.values()}) == leaves
        found.append(read())
    waited, left = found
    assert left == waited
    assert left.logprobs.keys() == {i for i, k in enumerate(logprobs) if k is not None}


def damage_first_row(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a logit of a step's first row NaN."""
    logits_of = runner.model.compute_logits

    def damaged(hidden: Tensor) -> Tensor:
        logits = logits_of(hidden)
        logits[0, 5] = torch.nan
        return logits

    monkeypatch.setattr(runner.model, "compute_logits", damaged)


def test_a_row_that_fails_reports_nothing_and_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(leaves_tokens=True)
    damage_first_row(runner, monkeypatch)
    asks = introducing(new(0, [1, 2, 3], logprobs=2), new(1, [7], logprobs=2))
    result = begin(runner, [(0, 0, 3, 1), (1, 0, 1, 1)], **asks)()
    assert result.token_ids == [[], [8]]
    assert result.logprobs.keys() == {1}
    assert result.errors.keys() == {0}


def test_a_row_whose_logits_are_not_finite_fails_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(leaves_tokens=True)
    damage_first_row(runner, monkeypatch)
    asks = introducing(new(0, [1, 2, 3], temperature=1.0, seed=0), new(1, [7], temperature=1.0, top_k=1, seed=0))
    result = begin(runner, [(0, 0, 3, 1), (1, 0, 1, 1)], **asks)()
    assert result.token_ids == [[], [8]]
    assert "token 3 are not finite" in result.errors[0].message


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves tokens"])
def test_greedy_rows_alone_have_the_largest_logit_found_and_others_need_all(leaves: bool) -> None:
    others: list[dict[str, Any]] = [
        {"temperature": 1.0, "top_k": 1, "seed": 1},
        {"logprobs": 0},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1, "stop_token_ids": [4]},
    ]
    for params in [{}, *others]:
        runner = make_runner(leaves_tokens=leaves)
        asks = introducing(new(0, [1, 2, 3]), new(1, [7], **params))
        result = begin(runner, [(0, 0, 3, 1), (1, 0, 1, 1)], **asks)()
        assert result.token_ids == [[4], [8]], params
        assert runner.model.num_largest_rows == ([] if params else [2]), params  # type: ignore[attr-defined]


def test_a_greedy_fork_has_the_token_of_the_largest_logit_in_each_branch(runner: ModelRunner) -> None:
    result = step(runner, [(0, 0, 3, 3), (1, 0, 1, 1)], **introducing(new(0, [1, 2, 3], n=3), new(1, [7])))
    assert result.forks == {0: [4, 4, 4]}
    assert result.token_ids == [[], [8]]
    assert runner.model.num_largest_rows == [2]  # type: ignore[attr-defined]


@pytest.mark.parametrize("leaves", [False, True], ids=["waits", "leaves tokens"])
def test_a_greedy_row_whose_logits_are_not_finite_fails_alone(leaves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(leaves_tokens=leaves)
    damage_first_row(runner, monkeypatch)
    result = begin(runner, [(0, 0, 3, 1), (1, 0, 1, 1)], **introducing(new(0, [1, 2, 3]), new(1, [7])))()
    assert runner.model.num_largest_rows == [2]  # type: ignore[attr-defined]
    assert result.token_ids == [[], [8]]
    assert "token 3 are not finite (the largest is nan)" in result.errors[0].message
    assert result.errors.keys() == {0}


def test_only_sequences_that_reach_their_last_token_are_sampled(runner: ModelRunner) -> None:
    result = step(
        runner,
        [(0, 0, 3, 1), (1, 0, 2, 0), (2, 0, 1, 1)],
        **introducing(new(0, [1, 2, 3]), new(1, [4, 5, 6, 7]), new(2, [8])),
    )
    assert result.token_ids == [[4], [], [9]]
    assert result.logprobs == {}
    assert runner.model.num_logit_rows == [2]  # type: ignore[attr-defined]
    again = step(runner, [(1, 2, 2, 1), (0, 3, 1, 1)], new_token_ids={0: (3, [4])})
    assert again.token_ids == [[8], [5]]


def test_a_step_that_schedules_nothing_still_forgets_rows_and_copies_blocks(runner: ModelRunner) -> None:
    step(runner, [(0, 0, 3, 1)], **introducing(new(0, [1, 2, 3])))
    for cache in runner.cache.caches:
        cache.copy_(torch.rand(cache.shape))
    before = [cache.clone() for cache in runner.cache.caches]
    result = runner.execute(SchedulerOutputs(removed_seq_ids=[0], blocks_to_copy=[(3, 7), (7, 9)]))
    assert result.token_ids == []
    assert not runner.batch.rows
    kept = [i for i in range(60) if i not in (7, 9)]
    for cache, old in zip(runner.cache.caches, before, strict=True):
        assert torch.equal(cache[:, 7], old[:, 3])
        assert torch.equal(cache[:, 9], old[:, 3]), "pairs are applied in order"
        assert torch.equal(cache[:, kept], old[:, kept])


def test_a_fork_draws_one_token_for_each_branch_once(runner: ModelRunner) -> None:
    first = step(runner, [(0, 0, 2, 0)], **introducing(new(0, [1, 2, 3], n=3, logprobs=0)))
    assert first.token_ids == [[]]
    for _ in range(2):  # to draw changes nothing
        forked = step(runner, [(0, 2, 1, 3)])
        assert forked.token_ids == [[]]
        assert forked.forks == {0: [4, 4, 4]}
        assert len(forked.logprobs[0]) == 3
    assert step(runner, [(0, 3, 1, 1)], new_token_ids={0: (3, [4])}).token_ids == [[5]]


@pytest.mark.parametrize("chunks", [[170], [1] * 170, [64, 64, 42], [65, 1, 63, 41], [100, 70]])
@pytest.mark.parametrize("k", [0, 3])
def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut(runner: ModelRunner, chunks: list[int], k: int) -> None:
    prompt = [i * i % VOCAB_SIZE for i in range(170)]
    positions: list[PositionLogprobs] = []
    computed = 0
    for count in chunks:
        fields = {} if computed else introducing(new(0, prompt, prompt_logprobs=k))
        result = step(runner, [(0, computed, count, int(computed + count == 170))], **fields)
        positions += result.prompt_logprobs.get(0, [])
        computed += count
    assert len(positions) == 169
    hidden = torch.tensor([[token, position] for position, token in enumerate(prompt[:-1])]).float()
    expected = torch.log_softmax(Successor().compute_logits(hidden), dim=-1)
    for position, token, row in zip(positions, prompt[1:], expected, strict=True):
        assert position.token_ids[0] == token
        assert position.logprobs == pytest.approx(row[position.token_ids].tolist(), abs=1e-6)
        assert position.rank == 1 + int((row > row[token]).sum()) + int((row[:token] == row[token]).sum())
        assert len(position.token_ids) == (k + 1 if position.rank > k else max(k, 1))
    rows = runner.model.num_logit_rows  # type: ignore[attr-defined]
    assert max(rows) <= model_runner.PROMPT_LOGPROB_ROWS


@pytest.mark.parametrize("chunks", [[170], [1] * 170, [100, 70], [65, 1, 63, 41]])
@pytest.mark.parametrize("num_reported", [0, 1, 64, 99, 168, 169])
def test_what_was_reported_before_a_preemption_is_not_scored_again(
    runner: ModelRunner, chunks: list[int], num_reported: int
) -> None:
    prompt = [i * i % VOCAB_SIZE for i in range(170)]
    whole = step(runner, [(0, 0, 170, 1)], **introducing(new(0, prompt, prompt_logprobs=2))).prompt_logprobs[0]
    runner.execute(SchedulerOutputs(removed_seq_ids=[0], preempted_seq_ids=[0]))
    runner.model.num_logit_rows.clear()  # type: ignore[attr-defined]
    back = replace(new(0, prompt, prompt_logprobs=2).sequence, num_prompt_logprobs=num_reported)
    positions: list[PositionLogprobs] = []
    computed = 0
    for count in chunks:
        fields = {} if computed else {"new_sequences": [back]}
        result = step(runner, [(0, computed, count, int(computed + count == 170))], **fields)
        positions += result.prompt_logprobs.get(0, [])
        computed += count
    assert positions == whole[num_reported:], "the same bits"
    num_rows = sum(runner.model.num_logit_rows)  # type: ignore[attr-defined]
    assert num_rows == 169 - num_reported + 1, "and the last one, which is sampled"


def test_prompts_are_scored_beside_sequences_that_did_not_ask(runner: ModelRunner) -> None:
    result = step(
        runner,
        [(0, 0, 3, 1), (1, 0, 4, 1), (2, 0, 1, 1)],
        **introducing(new(0, [1, 2, 3]), new(1, [4, 5, 9, 7], prompt_logprobs=0), new(2, [8], prompt_logprobs=0)),
    )
    assert [entry.token_ids for entry in result.prompt_logprobs[1]] == [[5], [9], [7]]
    assert result.prompt_logprobs[1][0].rank == 1
    assert result.prompt_logprobs.keys() == {1}, "a prompt of one token has nothing to score"
    assert step(runner, [(1, 4, 1, 1)], new_token_ids={1: (4, [8])}).prompt_logprobs == {}


def test_a_preempted_sequence_comes_back_with_other_blocks_and_all_its_tokens(runner: ModelRunner) -> None:
    step(runner, [(0, 0, 3, 1)], **introducing(new(0, [1, 2, 3])))
    runner.execute(SchedulerOutputs(removed_seq_ids=[0], preempted_seq_ids=[0]))
    back = NewSequenceData(0, "0", 0, [4], [(0, [5])])
    assert step(runner, [(0, 0, 4, 1)], new_sequences=[back]).token_ids == [[5]]
    assert runner.model.slots[-1] == [20, 21, 22, 23]  # type: ignore[attr-defined]


def test_blocks_change_where_the_instruction_says(runner: ModelRunner) -> None:
    step(runner, [(0, 0, 4, 1)], **introducing(new(0, [1, 2, 3, 4])))
    step(runner, [(0, 4, 1, 1)], new_block_ids={0: [(1, [8])]}, new_token_ids={0: (4, [5])})
    copied: dict[str, Any] = {"new_block_ids": {0: [(1, [9])]}, "blocks_to_copy": [(8, 9)]}
    step(runner, [(0, 5, 1, 1)], new_token_ids={0: (5, [6])}, **copied)
    assert runner.model.slots[1:] == [[32], [37]]  # type: ignore[attr-defined]
