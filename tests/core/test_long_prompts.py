"""Long prompts beside short ones, beside each other, and with logprobs; counted in steps, tokens and blocks."""

from __future__ import annotations

import pytest

from quire.core.order.budget import MAX_SCORED_TOKENS, SHORT_STEP_WORK, StepCost
from quire.core.order.policy import ByPriority
from tests.fakes import FakeCore, expected_tokens

FREE = StepCost(context_per_token=1e30)
"""Reading context costs nothing, so work is tokens."""


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt that shares no block with others."""
    return [number % 50, number // 50, *[(number * 7 + i) % 50 for i in range(length - 2)]]


def core_with(num_blocks: int = 1024, tokens: int = 1024, **more: object) -> FakeCore:
    limits = {"max_num_batched_tokens": tokens, "max_chunk_tokens": tokens, "cost": FREE, "max_num_seqs": 32}
    return FakeCore(num_blocks=num_blocks, block_size=16, tick_s=1 / 1024, **{**limits, **more})


def tokens_of(core: FakeCore, request_id: str) -> int:
    """Tokens of a request that the last step computed."""
    plan, sequences = core.last_plan, core.executor.sequences
    counts = zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True)
    return sum(count for seq_id, count in counts if sequences[seq_id].request_id == request_id)


# -- a long one beside short ones ------------------------------------------------------------------------------------


def test_short_prompts_do_not_wait_for_a_long_one_and_it_keeps_half_of_every_second_step() -> None:
    core = core_with()
    core.submit("short0", prompt_of(0, 40), max_tokens=4)
    core.step()
    core.submit("long", prompt_of(999, 6000), max_tokens=1)
    submitted_at, first_token_at, step, last = {}, {}, 0, SHORT_STEP_WORK
    while ("long", 0) not in core.finished:
        step += 1
        core.submit(f"short{step}", prompt_of(step, 40), max_tokens=4)
        submitted_at[f"short{step}"] = step
        num_running = len(core.scheduler.running)
        is_long = step == 1 or core.lives.groups["long"].sequences[0].num_left > 1024
        for output in core.step():
            first_token_at.setdefault(output.request_id, step)
        if is_long:
            last, before = tokens_of(core, "long"), last
            assert core.last_plan.num_batched_tokens <= SHORT_STEP_WORK + num_running + 1
            assert last + before >= SHORT_STEP_WORK // 2
    assert step <= (6000 - 1024) / (SHORT_STEP_WORK / 4) + 2, "what fits into a step is no long prompt"
    waits = [first_token_at[name] - at for name, at in submitted_at.items() if at < step]
    assert max(waits) == 0, "128 tokens a step are room for each of them at once"
    core.run()
    assert core.tokens["long", 0] == expected_tokens(prompt_of(999, 6000), 0, 1)


def test_a_short_prompt_has_its_step_for_itself_and_a_long_one_goes_on_in_the_next() -> None:
    core = core_with()
    core.submit("first", prompt_of(0, 40), max_tokens=1)
    core.step()
    core.submit("long", prompt_of(1, 6000), max_tokens=1)
    core.step()
    for i in range(2, 8):
        core.submit(f"short{i}", prompt_of(i, 200), max_tokens=1)
        core.step()
        assert (tokens_of(core, f"short{i}"), tokens_of(core, "long")) == (200, 0)
        core.step()
        assert tokens_of(core, "long") == SHORT_STEP_WORK
    core.run()


def test_a_long_prompt_goes_on_while_a_short_one_beside_it_cannot_start() -> None:
    """No step is empty."""
    core = core_with(max_num_seqs=1)
    core.submit("first", prompt_of(0, 40), max_tokens=1)
    core.step()
    core.submit("long", prompt_of(1, 6000), max_tokens=1)
    core.submit("short", prompt_of(2, 40), max_tokens=1)
    core.step()
    while ("long", 0) not in core.finished:
        core.step()
        assert tokens_of(core, "long") > 0
    core.run()
    assert ("short", 0) in core.finished


def test_a_long_prompt_alone_has_whole_steps() -> None:
    core = core_with()
    core.submit("long", prompt_of(1, 5000), max_tokens=1)
    core.run()
    assert core.executor.num_steps <= 6, "five steps of 1024, and one that clears up"


def test_of_several_long_prompts_each_gets_on_and_the_first_has_half() -> None:
    core = core_with()
    core.submit("short", [1, 2], max_tokens=200)
    core.step()
    for i in range(3):
        core.submit(f"long{i}", prompt_of(i, 3000), max_tokens=1)
    core.step()
    for _ in range(8):
        core.step()
        assert core.last_plan.num_batched_tokens <= SHORT_STEP_WORK + 4
        assert tokens_of(core, "long0") >= SHORT_STEP_WORK // 2
        assert all(tokens_of(core, f"long{i}") > 0 for i in range(3))
    core.run()
    for i in range(3):
        assert core.tokens[f"long{i}", 0] == expected_tokens(prompt_of(i, 3000), 0, 1)


def test_of_short_prompts_beside_a_long_one_those_with_the_least_left_come_first() -> None:
    core = core_with()
    core.submit("long", prompt_of(1, 6000), max_tokens=1)
    core.submit("middle", prompt_of(2, 900), max_tokens=1)
    core.step()
    for i in range(4):
        core.submit(f"short{i}", prompt_of(3 + i, 30), max_tokens=1)
    ended: list[str] = []
    while len(ended) < 5:
        ended += [output.request_id for output in core.step() if output.finish_reason is not None]
    assert set(ended[:4]) == {f"short{i}" for i in range(4)}
    assert ended[4] == "middle"
    core.run()


# -- half-computed prompts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, ByPriority(0.0)])
def test_prompts_of_which_one_fits_at_a_time_run_one_after_the_other(policy: ByPriority | None) -> None:
    """Each needs 60 % of the pool; in chunks of 4 the first would leave room for the others' first chunks."""
    more = {} if policy is None else {"policy": policy}
    core = FakeCore(num_blocks=20, block_size=4, max_chunk_tokens=4, **more)
    for i in range(5):
        core.submit(str(i), prompt_of(i, 46), max_tokens=3)
    while core.lives.has_work():
        core.step()
        assert len(core.scheduler.running) <= 1
    assert core.scheduler.num_preemptions == 0
    assert core.executor.num_steps == 5 * (12 + 2), "twelve chunks, the last of which gives the first of three tokens"
    for i in range(5):
        assert core.tokens[str(i), 0] == expected_tokens(prompt_of(i, 46), 0, 3)


def test_short_ones_start_beside_a_large_one_that_waits_and_do_not_delay_it() -> None:
    core = FakeCore(num_blocks=20, block_size=4, max_num_batched_tokens=64, max_chunk_tokens=64)
    core.submit("first", prompt_of(0, 46), max_tokens=3)
    core.step()
    core.submit("large", prompt_of(1, 62), max_tokens=2)
    for i in range(40):
        core.submit(f"short{i}", prompt_of(2 + i, 6), max_tokens=1 + i % 3)
    core.step()
    assert sum(name.startswith("short") for name, _ in core.tokens) == 4, "two blocks each, eight are free"
    large = core.lives.groups["large"].sequences[0]
    num_held_back = 0
    while large.num_computed_tokens == 0:
        held = sum(seq.num_blocks for seq in core.scheduler.running if seq.rank > large.rank)
        fits_alone = core.blocks.pool.num_free + held >= 16
        before = {seq.group.request_id for seq in core.scheduler.running}
        core.step()
        if fits_alone and large.num_computed_tokens == 0:
            assert {seq.group.request_id for seq in core.scheduler.running} <= before, "nobody overtakes it any more"
        num_held_back += fits_alone and large.num_computed_tokens == 0
    assert num_held_back > 0, "it waited for those that had started before there was room"
    assert core.executor.num_steps <= 8
    assert core.scheduler.num_preemptions == 0
    core.run()


# -- prompt logprobs -------------------------------------------------------------------------------------------------


def running(core: FakeCore) -> set[str]:
    return {seq.group.request_id for seq in core.scheduler.running}


def num_scored(core: FakeCore) -> int:
    return sum(map(len, core.scored.values()))


def test_prompts_with_logprobs_are_computed_in_small_pieces_while_others_generate() -> None:
    core = core_with()
    core.submit("other", [1, 2], max_tokens=100)
    core.step()
    for i in range(5):
        core.submit(str(i), prompt_of(i, 150), max_tokens=2, params={"prompt_logprobs": 1})
    steps = 0
    while not all((str(i), 0) in core.finished for i in range(5)):
        before = num_scored(core), len(core.tokens["other", 0])
        core.step()
        steps += 1
        assert num_scored(core) - before[0] <= MAX_SCORED_TOKENS
        assert len(core.tokens["other", 0]) == before[1] + 1
    assert steps <= 5 * 149 / MAX_SCORED_TOKENS + 3, "the pieces are whole ones"
    for i in range(5):
        assert core.scored[str(i)] == list(range(1, 150))
    core.run()


def test_a_prompt_with_logprobs_alone_is_computed_at_once() -> None:
    core = core_with()
    core.submit("a", prompt_of(1, 900), max_tokens=1, params={"prompt_logprobs": 1})
    core.step()
    assert core.scored["a"] == list(range(1, 900))
    core.run()


def test_requests_without_prompt_logprobs_pass_those_that_wait_for_their_share() -> None:
    core = core_with()
    core.submit("other", [1, 2], max_tokens=100)
    core.step()
    for i in range(3):
        core.submit(str(i), prompt_of(i, 500), max_tokens=1, params={"prompt_logprobs": 1})
    core.submit("late", [3, 4], max_tokens=1)
    core.step()
    assert ("late", 0) in core.finished
    core.run()
    assert all(core.scored[str(i)] == list(range(1, 500)) for i in range(3))


@pytest.mark.parametrize("chunk", [1, 3, 7, 32])
def test_a_preempted_prompt_is_not_scored_again(chunk: int) -> None:
    core = FakeCore(policy=ByPriority(0.0), max_num_seqs=1, num_blocks=32, max_chunk_tokens=chunk)
    core.submit("low", prompt_of(1, 60), priority=9, max_tokens=3, params={"prompt_logprobs": 1})
    high = 0
    while core.lives.has_work():
        core.step()
        if high < 6 and core.scored["low"] and "low" in running(core):
            core.submit(f"high{high}", prompt_of(2 + high, 4), priority=0, max_tokens=2)
            high += 1
    assert core.scheduler.num_preemptions >= (3 if chunk < 32 else 1)
    assert core.scored["low"] == list(range(1, 60)), "each position once: the fake worker scores what it is told to"
    assert core.tokens["low", 0] == expected_tokens(prompt_of(1, 60), 0, 3)


# -- the cost of context ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(), ((100, 0.5),), ((10, 0.25), (300, 0.75))])
@pytest.mark.parametrize("first", [0, 50, 1000])
def test_the_work_of_a_chunk_is_the_sum_over_its_tokens_and_layers(
    windows: tuple[tuple[int, float], ...], first: int
) -> None:
    cost = StepCost(64.0, windows)
    full = 1 - sum(share for _, share in windows)
    naive = sum(
        1 + (full * position + sum(share * min(window, position) for window, share in windows)) / 64.0
        for position in range(first, first + 8)
    )
    assert cost.work(first, 8) == pytest.approx(naive, rel=0.02)
    num_tokens = cost.tokens_for(first, 100.0)
    assert 0.5 * 100 <= cost.work(first, num_tokens) <= 2 * 100
