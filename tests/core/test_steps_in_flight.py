"""Steps that are decided while others are in flight: the same tokens, and nobody gives way too early."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.core.order.policy import policy_of
from tests.fakes import STATE, FakeCore, expected_tokens

DEPTHS = (2, 3)


@pytest.mark.parametrize("seed", range(60))
def test_any_mix_says_what_it_says_one_step_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([10, 14, 40])
    core = FakeCore(
        num_blocks=num_blocks,
        max_model_len=40,
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice([6, 12, 32]),
        max_chunk_tokens=rng.choice([3, 32]),
        windows=rng.choice([(None,), (STATE,), (None, 7), (6,), (None, STATE)][: 5 if num_blocks == 40 else 2]),
        enable_prefix_caching=rng.random() < 0.7,
        tiers=rng.choice([(), (), (4,)]),
        max_steps_in_flight=rng.choice(DEPTHS),
        is_eager=rng.random() < 0.5,
    )
    expected: dict[tuple[str, int], list[int]] = {}
    for index in range(rng.randint(2, 9)):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
        max_tokens, n, name = rng.randint(1, 14), rng.choice([1, 1, 1, min(2, core.scheduler.max_num_seqs)]), str(index)
        stops = sorted(rng.sample(range(50), 4))
        core.submit(name, prompt, max_tokens=max_tokens, params={"n": n, "stop_token_ids": stops})
        for branch in range(n):
            expected[name, branch] = up_to_stop(expected_tokens(prompt, branch, max_tokens), stops)
        for _ in range(rng.randrange(4)):
            core.step()
        what = rng.random()
        if what < 0.1:
            core.abort(name)
            expected = {key: tokens for key, tokens in expected.items() if key[0] != name}
        elif what < 0.2 and core.lives.has_work():
            core.interrupt(is_computed=rng.random() < 0.5)
        elif what < 0.3 and name in core.lives.groups:
            core.scheduler.add(core.lives.withdraw(name))
    core.run()
    assert {key: core.tokens[key] for key in expected} == expected


def up_to_stop(token_ids: list[int], stops: list[int]) -> list[int]:
    """The tokens with the first stop token, which is the last."""
    ends = [index for index, token_id in enumerate(token_ids) if token_id in stops]
    return token_ids[: ends[0] + 1] if ends else token_ids


@pytest.mark.parametrize("depth", DEPTHS)
def test_steps_overlap_and_an_end_by_length_computes_nothing_more(depth: int) -> None:
    core, computed = FakeCore(num_blocks=40, max_steps_in_flight=depth), 0
    for name in "abc":
        core.submit(name, [1, 2, 3], max_tokens=10)
    core.run()
    computed = core.lives.totals.num_computed_tokens
    assert core.num_ahead >= 8
    assert computed == 3 * (3 + 9), "the last token of each is drawn and not computed"


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_is_learnt_while_later_steps_are_in_flight_and_what_they_draw_is_never_told(depth: int) -> None:
    prompt = [1, 2, 3]
    answer = expected_tokens(prompt, 0, 20)
    core = FakeCore(num_blocks=40, max_steps_in_flight=depth)
    core.submit("a", prompt, max_tokens=20, params={"stop_token_ids": [answer[4]]})
    core.run()
    length = answer.index(answer[4]) + 1
    assert core.tokens["a", 0] == answer[:length]
    assert core.lives.totals.num_computed_tokens == 3 + length - 1 + depth - 1, "one token for each step in flight"


def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    core = FakeCore(num_blocks=6, max_steps_in_flight=2, max_model_len=24)
    for name in "ab":
        core.submit(name, [1, 2, 3, 4], max_tokens=12)
    before = 0
    while core.lives.has_work():
        in_flight = len(core.in_flight)
        core.step()
        assert core.lives.totals.num_preemptions == before or not in_flight
        before = core.lives.totals.num_preemptions
    assert before > 0
    for name in "ab":
        assert core.tokens[name, 0] == expected_tokens([1, 2, 3, 4], 0, 12)


def test_by_priority_a_step_waits_only_where_somebody_gives_way() -> None:
    core = FakeCore(num_blocks=40, max_steps_in_flight=2, max_num_seqs=1, policy=policy_of("priority", 0.0))
    core.submit("a", [1, 2, 3], max_tokens=12)
    core.submit("later", [4], max_tokens=2, priority=1)
    core.step()
    core.step()
    before = core.num_ahead
    assert before == 2
    core.submit("first", [5], max_tokens=2, priority=-1)
    core.step()
    assert core.num_ahead == before
    core.step()
    assert [seq.group.request_id for seq in core.scheduler.running] == ["first"]
    core.run()
    assert core.tokens["a", 0] == expected_tokens([1, 2, 3], 0, 12)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_state_is_read_that_a_step_in_flight_writes(depth: int) -> None:
    core = FakeCore(num_blocks=40, max_steps_in_flight=depth, windows=(STATE,))
    for name in "ab":
        core.submit(name, [1, 2, 3], max_tokens=10)
    while core.lives.has_work():
        core.step()
        for seq in core.scheduler.running:
            assert len(seq.tables[0].held) <= 1 + depth, "a page to read, and one for each step in flight"
    assert core.num_ahead >= 8
    for name in "ab":
        assert core.tokens[name, 0] == expected_tokens([1, 2, 3], 0, 10)


@pytest.mark.parametrize(
    "options", [{"windows": (STATE,)}, {"tiers": (8,)}], ids=["states of recurrent layers", "tiers"]
)
def test_where_memory_is_scarce_steps_wait_and_requests_end(options: dict[str, Any]) -> None:
    core = FakeCore(num_blocks=8, max_steps_in_flight=2, max_model_len=24, **options)
    for index in range(4):
        core.submit(str(index), [index] * 9, max_tokens=6)
    core.run()
    for index in range(4):
        assert core.tokens[str(index), 0] == expected_tokens([index] * 9, 0, 6)


def test_a_request_that_fails_in_flight_fails_alone() -> None:
    core = FakeCore(num_blocks=40, max_steps_in_flight=2)
    core.submit("poison", [9, 9], max_tokens=9)
    core.submit("other", [1, 2, 3], max_tokens=9)
    core.step()
    assert core.in_flight
    core.executor.fail_on = lambda request_id: request_id == "poison"
    core.run()
    assert core.finished["poison", 0].error is not None
    assert core.tokens["other", 0] == expected_tokens([1, 2, 3], 0, 9)


def test_new_requests_start_while_a_step_is_in_flight() -> None:
    core = FakeCore(num_blocks=40, max_steps_in_flight=2)
    core.submit("a", [1, 2, 3], max_tokens=12)
    core.step()
    core.submit("b", [4, 5], max_tokens=3)
    before = core.num_ahead
    core.step()
    assert core.num_ahead == before + 1
    assert "b" in {request.request_id for request in core.last_plan.new_requests}
    core.run()
    assert core.tokens["b", 0] == expected_tokens([4, 5], 0, 3)
