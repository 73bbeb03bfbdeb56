"""What runs when, and that nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.order.queue import Tenant
from quire.core.sequence import Sequence, SequenceGroup
from quire.core.stop import finish_of
from quire.messages.output import FinishReason, PositionLogprobs
from quire.messages.request import EngineCoreRequest
from quire.messages.step import ModelRunnerOutput
from quire.sampling_params import SamplingParams
from tests.fakes import FakeCore, expected_tokens, specs_of


def assert_right(core: FakeCore, request_id: str, prompt: list[int], num_tokens: int, branch: int = 0) -> None:
    assert core.tokens[request_id, branch] == expected_tokens(prompt, branch, num_tokens)


def test_one_request_gets_its_tokens_and_ends_by_length() -> None:
    core = FakeCore()
    core.submit("a", [1, 2, 3], max_tokens=5)
    core.run()
    assert_right(core, "a", [1, 2, 3], 5)
    assert core.finished["a", 0].finish_reason is FinishReason.LENGTH


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    core = FakeCore(num_blocks=32, max_num_batched_tokens=8, max_chunk_tokens=8)
    core.submit("short", [1], max_tokens=20)
    core.step()
    core.submit("long", list(range(40)), max_tokens=2)
    while ("long", 0) not in core.tokens:
        produced = len(core.tokens["short", 0])
        core.step()
        assert len(core.tokens["short", 0]) == produced + 1, "the long prompt held the short one up"
        assert core.last_plan.num_batched_tokens <= 8
    core.run()
    assert_right(core, "long", list(range(40)), 2)


def test_one_token_sequences_are_served_before_the_rest_of_the_budget_is_given_away() -> None:
    core = FakeCore(num_blocks=64, max_num_batched_tokens=8, max_chunk_tokens=8)
    core.submit("long", list(range(30)), max_tokens=1)
    core.step()
    for name in "abc":
        core.submit(name, [ord(name)], max_tokens=8)
    core.step()
    core.step()
    while not core.finished:
        before = {name: len(core.tokens.get((name, 0), [])) for name in "abc"}
        running = {seq.group.request_id for seq in core.scheduler.running}
        core.step()
        for name in running & set("abc"):
            assert len(core.tokens[name, 0]) == before[name] + 1


def test_preempted_request_keeps_its_generated_tokens() -> None:
    core = FakeCore(num_blocks=4, block_size=4)
    core.submit("first", list(range(8)), max_tokens=8)
    core.submit("second", [9, 8, 7, 6], max_tokens=8)
    core.run()
    assert core.scheduler.num_preemptions >= 1
    assert_right(core, "first", list(range(8)), 8)
    assert_right(core, "second", [9, 8, 7, 6], 8)


def test_the_first_to_arrive_is_never_preempted() -> None:
    core = FakeCore(num_blocks=4, block_size=4)
    core.submit("first", list(range(8)), max_tokens=8)
    for i in range(5):
        core.submit(f"later{i}", [i, i], max_tokens=6)
    while ("first", 0) not in core.finished:
        core.step()
        assert not any(seq.group.request_id == "first" for seq in core.scheduler.waiting), (
            "the oldest request lost its place"
        )
    core.run()


def test_equal_prompts_share_blocks_and_say_how_many_tokens_were_cached() -> None:
    core = FakeCore()
    core.submit("a", list(range(10)), max_tokens=2)
    core.run()
    core.submit("b", list(range(10)), max_tokens=2)
    core.run()
    assert core.finished["b", 0].num_cached_tokens == 8
    assert_right(core, "b", list(range(10)), 2)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    core = FakeCore()
    core.submit("a", list(range(8)), max_tokens=6)
    core.run()
    core.submit("b", list(range(8)), max_tokens=6)
    core.run()
    assert core.finished["b", 0].num_cached_tokens == 4
    assert_right(core, "b", list(range(8)), 6)


def test_different_salts_share_nothing() -> None:
    core = FakeCore()
    core.submit("a", list(range(8)), cache_salt="one")
    core.run()
    core.submit("b", list(range(8)), cache_salt="two")
    core.run()
    assert core.finished["b", 0].num_cached_tokens == 0


def test_a_request_with_prompt_logprobs_does_not_read_the_cache() -> None:
    core = FakeCore()
    core.submit("a", list(range(8)))
    core.run()
    core.submit("b", list(range(8)), params={"prompt_logprobs": 1})
    core.run()
    assert core.finished["b", 0].num_cached_tokens == 0


def test_a_colliding_hash_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    same = lambda parent, token_ids, block_size: [b"same"] * (len(token_ids) // block_size)  # noqa: E731
    monkeypatch.setattr("quire.core.kv.block_manager.block_hashes", same)
    core = FakeCore()
    for name, prompt in (("a", list(range(9))), ("b", list(range(20, 29))), ("c", [5] * 9)):
        core.submit(name, prompt, max_tokens=3)
        core.run()
        assert core.finished[name, 0].num_cached_tokens == 0
        assert_right(core, name, prompt, 3)


def test_branches_fork_after_one_prefill_and_copy_on_write() -> None:
    core = FakeCore()
    core.submit("a", list(range(6)), max_tokens=5, params={"n": 4})
    core.step()
    assert core.last_plan.num_batched_tokens == 6
    assert core.blocks.pool.num_blocks - core.blocks.pool.num_free == 2, "the prompt is held once"
    core.run()
    for branch in range(4):
        assert_right(core, "a", list(range(6)), 5, branch)


def test_a_group_waits_until_all_its_branches_have_room() -> None:
    core = FakeCore(max_num_seqs=4)
    core.submit("a", [1], max_tokens=6)
    core.submit("b", [2], max_tokens=3, params={"n": 4})
    core.step()
    assert [seq.group.request_id for seq in core.scheduler.running] == ["a"]
    core.run()
    assert_right(core, "b", [2], 3, 3)


def test_one_branch_can_be_aborted_and_the_others_go_on() -> None:
    core = FakeCore()
    core.submit("a", [1, 2, 3], max_tokens=6, params={"n": 3})
    core.step()
    assert core.abort("a", 1)
    core.run()
    assert_right(core, "a", [1, 2, 3], 6, 2)
    assert ("a", 1) not in core.finished


def test_abort_of_an_unknown_request_does_nothing() -> None:
    assert not FakeCore().abort("nobody")


@given(
    last=st.integers(0, 3),
    num_output_tokens=st.integers(1, 4),
    eos=st.lists(st.integers(0, 3), max_size=2, unique=True),
    stops=st.lists(st.integers(0, 3), max_size=2),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 3),
    max_tokens=st.integers(3, 5),
    max_model_len=st.integers(4, 8),
)
def test_what_ends_a_sequence_and_why(
    last: int,
    num_output_tokens: int,
    eos: list[int],
    stops: list[int],
    ignore_eos: bool,
    min_tokens: int,
    max_tokens: int,
    max_model_len: int,
) -> None:
    params = SamplingParams(stop_token_ids=stops, ignore_eos=ignore_eos, min_tokens=min_tokens, max_tokens=max_tokens)
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=[9, 9],
        sampling_params=params,
        seed=0,
        max_tokens=max_tokens,
        eos_token_ids=tuple(eos),
    )
    seq = Sequence(0, SequenceGroup(request, Tenant(""), (0.0, 0)), 0, [9, 9, *[7] * (num_output_tokens - 1), last])
    expected: tuple[FinishReason, int | None] | None = None
    if num_output_tokens >= max_tokens or 2 + num_output_tokens >= max_model_len:
        expected = FinishReason.LENGTH, None
    if num_output_tokens > min_tokens:
        if last in stops:
            expected = FinishReason.STOP, last
        if last in eos and not ignore_eos:
            expected = FinishReason.STOP, None if last == eos[0] else last
    assert finish_of(seq, max_model_len) == expected


def test_what_follows_the_end_of_a_sequence_in_the_same_step_is_dropped() -> None:
    core = FakeCore()
    core.submit("stops", [3, 1, 4], max_tokens=9, params={"stop_token_ids": [8], "logprobs": 0})
    core.submit("goes on", [3, 1, 4], max_tokens=9)
    plan = core.plan()
    logprobs = {plan.seq_ids[0]: [PositionLogprobs([token], [-0.5], 1) for token in (7, 8, 9)]}
    stops, goes_on = core.scheduler.update(plan, ModelRunnerOutput(token_ids=[[7, 8, 9], [7, 8, 9]], logprobs=logprobs))
    assert (stops.new_token_ids, stops.finish_reason, stops.stop_reason) == ([7, 8], FinishReason.STOP, 8)
    assert [entry.token_ids for entry in stops.new_logprobs or ()] == [[7], [8]]
    assert stops.stats is not None
    assert stops.stats.num_generation_tokens == 2
    assert (goes_on.new_token_ids, goes_on.finish_reason, goes_on.new_logprobs) == ([7, 8, 9], None, None)
    core.lives.check()


def test_end_of_sequence_and_stop_tokens_end_a_request_with_their_reasons() -> None:
    prompt = [3, 1, 4]
    first, second, third = expected_tokens(prompt, 0, 3)
    core = FakeCore()
    core.submit("eos", prompt, max_tokens=9, eos_token_ids=(second,))
    core.submit("more", prompt, max_tokens=9, eos_token_ids=(VOCAB_END, second))
    core.submit("stop", prompt, max_tokens=9, params={"stop_token_ids": [third]})
    core.submit("ignore", prompt, max_tokens=9, eos_token_ids=(second,), params={"ignore_eos": True})
    core.run()
    assert core.tokens["eos", 0] == [first, second]
    assert core.finished["eos", 0].stop_reason is None
    assert core.finished["more", 0].stop_reason == second
    assert (core.finished["stop", 0].finish_reason, core.finished["stop", 0].stop_reason) == (FinishReason.STOP, third)
    assert core.finished["ignore", 0].finish_reason is FinishReason.LENGTH


VOCAB_END = 10**6


def test_a_sequence_ends_at_the_context_limit() -> None:
    core = FakeCore(max_model_len=10)
    core.submit("a", [1] * 7, max_tokens=100)
    core.run()
    assert len(core.tokens["a", 0]) == 3


def test_only_the_guilty_request_of_a_failing_step_fails() -> None:
    core = FakeCore(num_blocks=64)
    core.executor.fail_on = lambda request_id: request_id == "poison"
    for i in range(5):
        core.submit(f"good{i}", [i, i, i], max_tokens=5)
        if i == 2:
            core.submit("poison", [7] * 5, max_tokens=5)
    core.run()
    assert core.finished["poison", 0].finish_reason is FinishReason.ERROR
    assert core.finished["poison", 0].error
    for i in range(5):
        assert_right(core, f"good{i}", [i, i, i], 5)


def test_a_request_that_turns_bad_later_fails_then() -> None:
    core = FakeCore(num_blocks=64)
    core.submit("good", [1, 2], max_tokens=8)
    core.submit("bad", [1, 3], max_tokens=8, params={"n": 2})
    core.step()
    core.executor.fail_on = lambda request_id: request_id == "bad"
    core.run()
    assert {core.finished["bad", branch].finish_reason for branch in (0, 1)} == {FinishReason.ERROR}
    assert_right(core, "good", [1, 2], 8)


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
"""Few different tokens, so that prefixes coincide."""
ACTIONS = st.one_of(
    st.tuples(st.just("add"), PROMPTS, st.integers(1, 12), st.integers(1, 4), st.sampled_from("abc")),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.one_of(st.none(), st.integers(0, 3))),
    st.tuples(st.just("poison"), st.integers(0, 30)),
    st.tuples(st.just("corrupt"), st.integers(0, 40)),
    st.tuples(st.just("reset")),
)


@settings(max_examples=300, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=40),
    windows=st.sampled_from([(None,), (5,), (None, 6), (None, 1, 9)]),
    spare_blocks=st.integers(0, 16),
    budget=st.integers(4, 40),
    caching=st.booleans(),
    several_tenants=st.booleans(),
    tiers=st.sampled_from([(), (1,), (3, 2), (40,), (8, 40)]),
)
def test_any_sequence_of_events_keeps_every_invariant(
    actions: list[tuple[object, ...]],
    windows: tuple[int | None, ...],
    spare_blocks: int,
    budget: int,
    caching: bool,
    several_tenants: bool,
    tiers: tuple[int, ...],
) -> None:
    core = FakeCore(
        tiers=tiers if caching else (),
        num_blocks=sum(spec.most_blocks(32, 7) for spec in specs_of(4, windows)) + spare_blocks,
        windows=windows,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_chunk_tokens=7,
        max_model_len=32,
        enable_prefix_caching=caching,
    )
    submitted: list[tuple[list[int], int, int]] = []
    disturbed: set[str] = set()
    poisoned: set[str] = set()
    core.executor.fail_on = poisoned.__contains__
    for action in actions:
        match action:
            case ("add", list() as prompt, int() as max_tokens, int() as n, str() as tenant):
                if not several_tenants:
                    tenant = ""
                core.submit(str(len(submitted)), prompt, max_tokens=max_tokens, params={"n": n}, tenant=tenant)
                submitted.append((prompt, max_tokens, n))
            case ("step", int() as count):
                for _ in range(count):
                    core.step()
            case ("abort", int() as which, branch):
                assert branch is None or isinstance(branch, int)
                if core.abort(str(which), branch):
                    disturbed.add(str(which))
                core.lives.check()
            case ("poison", int() as which):
                poisoned.add(str(which))
            case ("corrupt", int() as slot):
                core.executor.corrupt.add(slot)
            case ("reset",):
                core.blocks.forget_cached()
                core.executor.pages.clear()
    core.run()
    for index, (prompt, max_tokens, n) in enumerate(submitted):
        request_id = str(index)
        for branch in range(n):
            length = min(max_tokens, 32 - len(prompt))
            produced = core.tokens.get((request_id, branch), [])
            assert produced == expected_tokens(prompt, branch, length)[: len(produced)]
            if request_id not in disturbed | poisoned:
                assert len(produced) == length
                assert core.finished[request_id, branch].finish_reason is FinishReason.LENGTH
