"""Who is served first, who gives way, and that everybody ends; counted in steps and blocks, never in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.order.budget import StepCost
from quire.core.order.fairness import Shares
from quire.core.order.policy import ByPriority, FirstComeFirstServed, Policy, policy_of
from quire.core.sequence import Sequence
from quire.messages.request import EngineCoreRequest
from quire.sampling_params import SamplingParams
from tests.fakes import FakeCore, expected_tokens


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt that shares no block with others."""
    return [number % 50, number // 50 % 50, *[(number * 7 + i) % 50 for i in range(length - 2)]]


def core_by_priority(*, ageing_s: float = 0.0, **limits: object) -> FakeCore:
    return FakeCore(policy=ByPriority(ageing_s), **limits)


def running(core: FakeCore) -> set[str]:
    return {seq.group.request_id for seq in core.scheduler.running}


def request_of(priority: int, arrived_at: float) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(),
        seed=0,
        max_tokens=1,
        priority=priority,
        arrived_at=arrived_at,
    )


# -- the order -----------------------------------------------------------------------------------------------------

REQUESTS = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.floats(0, 1e7)), max_size=20)


@given(requests=REQUESTS, ageing_s=st.sampled_from([0.0, 1e-9, 0.5, 60.0, 1e9]))
def test_ranks_are_a_total_order_in_which_equals_stay_in_order_of_arrival(
    requests: list[tuple[int, float]], ageing_s: float
) -> None:
    policies: list[Policy] = [FirstComeFirstServed(), ByPriority(0.0), ByPriority(ageing_s)]
    by_arrival, by_priority, by_age = (
        sorted(range(len(requests)), key=lambda i, p=policy: p.rank(request_of(*requests[i]), i)) for policy in policies
    )
    assert by_arrival == list(range(len(requests)))
    assert by_priority == sorted(range(len(requests)), key=lambda i: requests[i][0])
    for policy in policies:
        assert len({policy.rank(request_of(*one), i) for i, one in enumerate(requests)}) == len(requests)
    equal = [i for i in by_age if requests[i] == requests[by_age[0]]]
    assert equal == sorted(equal)


@pytest.mark.parametrize(("waited", "comes_first"), [(179.0, False), (181.0, True)])
def test_waiting_for_an_ageing_time_counts_as_much_as_a_priority_lower_by_one(waited: float, comes_first: bool) -> None:
    policy = policy_of("priority", 60.0)
    patient, urgent = policy.rank(request_of(5, 1000.0), 0), policy.rank(request_of(2, 1000.0 + waited), 1)
    assert (patient < urgent) is comes_first


def test_the_policy_of_a_name() -> None:
    assert isinstance(policy_of("fcfs", 0.0), FirstComeFirstServed)
    assert isinstance(policy_of("priority", 0.0), ByPriority)


# -- seats and memory ----------------------------------------------------------------------------------------------


def test_lower_priorities_are_admitted_first() -> None:
    core = core_by_priority(max_num_seqs=1, num_blocks=64)
    order = []
    for name, priority in (("c", 3), ("a", 1), ("d", 3), ("b", 2)):
        core.submit(name, [priority], priority=priority, max_tokens=3)
    while core.lives.has_work():
        order += [output.request_id for output in core.step() if output.finish_reason is not None]
    assert order == ["a", "b", "c", "d"]
    assert core.scheduler.num_preemptions == 0


def test_a_request_takes_the_seat_of_the_last_in_order_and_of_nobody_else() -> None:
    core = core_by_priority(max_num_seqs=3, num_blocks=64)
    for name, priority in (("low", 9), ("lowest", 10), ("middle", 5)):
        core.submit(name, [priority], priority=priority, max_tokens=20)
    core.step()
    core.submit("high", [1, 2, 3], priority=1, max_tokens=4)
    core.step()
    assert running(core) == {"low", "middle", "high"}
    assert ("high", 0) in core.tokens
    assert core.scheduler.num_preemptions == 1
    core.run()
    assert core.scheduler.num_preemptions == 1
    assert core.tokens["lowest", 0] == expected_tokens([10], 0, 20)


def test_first_come_first_served_preempts_for_nobody_that_waits() -> None:
    core = FakeCore(max_num_seqs=1)
    core.submit("first", [1], max_tokens=6, priority=9)
    core.step()
    core.submit("second", [2], max_tokens=2, priority=-9)
    core.run()
    assert core.scheduler.num_preemptions == 0


def test_a_request_with_branches_takes_as_many_seats() -> None:
    core = core_by_priority(max_num_seqs=4, num_blocks=64)
    for i in range(4):
        core.submit(str(i), [i, i], priority=i, max_tokens=20)
    core.step()
    core.submit("wide", [7, 7, 7], priority=1, max_tokens=3, params={"n": 2})
    core.step()
    assert running(core) == {"0", "1", "wide"}, "of equal priorities the first to come goes first"
    core.run()
    for branch in range(2):
        assert core.tokens["wide", branch] == expected_tokens([7, 7, 7], branch, 3)


def test_a_request_takes_the_memory_of_those_after_it() -> None:
    core = core_by_priority(num_blocks=10, block_size=4, max_num_batched_tokens=64, max_chunk_tokens=64)
    core.submit("low", prompt_of(1, 22), priority=5, max_tokens=4)
    core.submit("lower", prompt_of(2, 10), priority=6, max_tokens=4)
    core.step()
    core.submit("high", prompt_of(3, 18), priority=0, max_tokens=4)
    core.step()
    assert running(core) == {"high", "lower"}, "the six blocks of one suffice, so the other keeps its three"
    core.run()
    assert core.scheduler.num_preemptions == 1


def test_nobody_is_preempted_where_it_would_not_suffice_for_a_seat() -> None:
    core = core_by_priority(max_num_seqs=4, num_blocks=64)
    for i in range(3):
        core.submit(f"first{i}", [i], priority=0, max_tokens=10)
    core.submit("low", [9], priority=9, max_tokens=30)
    core.step()
    core.submit("wide", [1, 1], priority=5, max_tokens=2, params={"n": 2})
    while len(core.finished) < 3:
        core.step()
        assert "low" in running(core)
    assert core.scheduler.num_preemptions == 0
    core.run()


def test_nobody_is_preempted_where_those_before_hold_the_memory() -> None:
    core = core_by_priority(num_blocks=10, block_size=4, max_num_batched_tokens=64, max_chunk_tokens=64)
    core.submit("first", prompt_of(1, 22), priority=0, max_tokens=3)
    core.submit("low", prompt_of(2, 6), priority=9, max_tokens=8)
    core.step()
    core.submit("large", prompt_of(3, 22), priority=5, max_tokens=2)
    core.step()
    assert running(core) == {"first", "low"}
    assert core.scheduler.num_preemptions == 0
    core.run()
    assert core.finished["first", 0].stats is not None
    assert core.finished["first", 0].stats.num_preemptions == 0


def test_nobody_is_preempted_where_a_half_computed_prompt_before_needs_the_memory() -> None:
    core = core_by_priority(num_blocks=10, block_size=4, max_num_batched_tokens=32, max_chunk_tokens=12)
    core.submit("first", prompt_of(1, 24), priority=0, max_tokens=2)
    core.submit("low", prompt_of(2, 12), priority=9, max_tokens=4)
    core.step()
    assert core.blocks.pool.num_free == 4
    core.submit("large", prompt_of(3, 24), priority=5, max_tokens=2)
    core.step()
    assert core.scheduler.num_preemptions == 0, "six are needed, three could be freed, but the first needs three more"
    core.run()


def test_shared_blocks_of_those_before_are_not_counted_as_free() -> None:
    core = core_by_priority(num_blocks=8, block_size=4, max_num_batched_tokens=64, max_chunk_tokens=64)
    shared = prompt_of(1, 16)
    core.submit("first", shared, priority=0, max_tokens=4)
    core.step()
    core.submit("low", [*shared, 1], priority=9, max_tokens=4)
    core.step()
    assert running(core) == {"first", "low"}
    core.submit("large", prompt_of(3, 16), priority=5, max_tokens=4)
    core.step()
    assert core.scheduler.num_preemptions == 0, "the low one has one block of its own, and the large one lacks two"
    core.run()


def test_a_long_prompt_of_a_high_priority_does_not_wait_for_one_of_a_low_priority() -> None:
    core = core_by_priority(num_blocks=256, max_num_batched_tokens=16, max_chunk_tokens=16, max_model_len=1000)
    core.submit("low", prompt_of(1, 400), priority=5, max_tokens=1)
    core.step()
    core.submit("high", prompt_of(2, 100), priority=0, max_tokens=1)
    for _ in range(7):
        core.step()
    assert ("high", 0) in core.finished, "100 tokens are seven steps of 16"
    core.run()
    assert core.scheduler.num_preemptions == 0


# -- ageing --------------------------------------------------------------------------------------------------------


def steps_beside_a_stream(core: FakeCore, name: str, *, most: int) -> int:
    """Steps until a request ends while in each of them another one of priority 0 comes."""
    for step in range(most):
        core.submit(f"stream{step}", [step % 50, step // 50], priority=0, arrived_at=float(step), max_tokens=1)
        core.step()
        if (name, 0) in core.finished:
            return step
    return most


def test_with_ageing_nobody_starves_under_an_endless_stream_of_higher_priorities() -> None:
    core = core_by_priority(ageing_s=10.0, max_num_seqs=1, num_blocks=64)
    core.submit("patient", [1, 2, 3], priority=5, arrived_at=0.0, max_tokens=4)
    needed = steps_beside_a_stream(core, "patient", most=500)
    assert 50 <= needed < 55, "five priorities are worth 50 seconds of waiting, here steps"
    assert core.tokens["patient", 0] == expected_tokens([1, 2, 3], 0, 4)
    core.run()


def test_without_ageing_priorities_are_absolute() -> None:
    core = core_by_priority(ageing_s=0.0, max_num_seqs=1, num_blocks=64)
    core.submit("patient", [1, 2, 3], priority=5, arrived_at=0.0, max_tokens=4)
    assert steps_beside_a_stream(core, "patient", most=200) == 200
    core.run()
    assert core.tokens["patient", 0] == expected_tokens([1, 2, 3], 0, 4)


# -- tenants -------------------------------------------------------------------------------------------------------


def test_priorities_order_the_requests_of_a_tenant_and_not_tenants() -> None:
    core = core_by_priority(max_num_seqs=4, num_blocks=256)
    for i in range(20):
        core.submit(f"pushy{i}", prompt_of(i, 6), priority=-1000, max_tokens=12, tenant="pushy")
        core.submit(f"modest{i}", prompt_of(50 + i, 6), priority=20 - i, max_tokens=12, tenant="modest")
    ended: list[str] = []
    while core.lives.has_work():
        ended += [output.request_id for output in core.step() if output.finish_reason is not None]
        tenants = [seq.group.tenant.name for seq in core.scheduler.running]
        if len(ended) < 30:
            assert max(map(tenants.count, tenants), default=0) <= 2, "an equal share of the seats for each"
    modest = [int(name.removeprefix("modest")) for name in ended if name.startswith("modest")]
    assert modest == sorted(modest, reverse=True), "lower priorities first, within the tenant"


def test_of_the_first_sequences_of_tenants_the_one_that_came_first_never_waits() -> None:
    core = core_by_priority(max_num_seqs=4, num_blocks=64)
    core.submit("modest", [1, 2], priority=9, max_tokens=9, tenant="modest")
    core.submit("pushy", [3, 4], priority=-9, max_tokens=9, tenant="pushy")
    core.step()
    queue, seqs = core.scheduler.waiting, core.scheduler.running
    shares = Shares(queue, seqs, max_num_seqs=4, num_blocks=64, max_num_tokens=32, step=2)
    assert [seq.group.request_id for seq in seqs] == ["pushy", "modest"]
    assert shares.in_turn(seqs)[0].group.request_id == "modest"
    assert shares.victim(seqs, ()).group.request_id == "pushy"
    core.run()


def test_a_tenant_with_low_priorities_cannot_take_the_memory_of_another_again_and_again() -> None:
    core = core_by_priority(num_blocks=16, block_size=4, max_num_seqs=4, max_model_len=64)
    core.submit("modest", prompt_of(99, 8), priority=100, max_tokens=40, tenant="modest")
    for i in range(12):
        core.submit(f"pushy{i}", prompt_of(i, 8), priority=-i, max_tokens=30, tenant="pushy")
    while ("modest", 0) not in core.finished:
        core.step()
    stats = core.finished["modest", 0].stats
    assert stats is not None
    assert stats.num_preemptions == 0, "it came first and is its tenant's only one"
    core.run()


# -- against a naive model -----------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(-2, 2), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, num_seats=st.integers(1, 4), num_blocks=st.integers(1, 6), ageing_s=st.sampled_from([0.0, 2.0]))
def test_the_first_in_order_run_and_nobody_else(
    events: list[tuple[str, int] | tuple[str, int, int]], num_seats: int, num_blocks: int, ageing_s: float
) -> None:
    """Each request takes one seat and one block for all its life, so who runs is the first few of a sorted list."""
    core = core_by_priority(
        ageing_s=ageing_s, max_num_seqs=num_seats, num_blocks=num_blocks, block_size=16, max_model_len=16
    )
    alive: dict[str, tuple[float, int]] = {}
    expected: dict[str, tuple[list[int], int]] = {}
    for event in [*events, ("step", 60)]:
        if event[0] == "add":
            number, (_, priority, max_tokens) = len(expected), event  # type: ignore[misc]
            prompt = [number % 50, 1, 2]
            core.submit(str(number), prompt, priority=priority, arrived_at=float(number), max_tokens=max_tokens)
            alive[str(number)] = priority + (number / ageing_s if ageing_s else 0), number
            expected[str(number)] = prompt, max_tokens
        elif event[0] == "abort":
            assert core.abort(str(event[1])) == (alive.pop(str(event[1]), None) is not None)
        else:
            for _ in range(event[1]):
                outputs = core.step()
                first = sorted(alive, key=alive.__getitem__)[: min(num_seats, num_blocks)]
                assert {output.request_id for output in outputs} == set(first)
                for output in outputs:
                    if output.finish_reason is not None:
                        del alive[output.request_id]
    core.run()
    for (name, _), tokens in core.tokens.items():
        assert tokens == expected_tokens(expected[name][0], 0, expected[name][1])[: len(tokens)]
    for name in core.finished:
        assert len(core.tokens[name]) == expected[name[0]][1]


ANY_EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.lists(st.integers(0, 2), min_size=1, max_size=20),
            st.integers(1, 12),
            st.fixed_dictionaries(
                {
                    "n": st.sampled_from([1, 1, 2, 4]),
                    "prompt_logprobs": st.sampled_from([None, None, 1]),
                }
            ),
            st.integers(-2, 2),
            st.sampled_from("abc"),
        ),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.one_of(st.none(), st.integers(0, 3))),
        st.tuples(st.just("interrupt")),
    ),
    max_size=40,
)


@settings(max_examples=400, deadline=None)
@given(
    events=ANY_EVENTS,
    name=st.sampled_from(["fcfs", "priority"]),
    ageing_s=st.sampled_from([0.0, 3.0]),
    spare_blocks=st.integers(0, 12),
    budget=st.integers(4, 40),
    chunk=st.integers(1, 9),
    caching=st.booleans(),
    num_tenants=st.integers(1, 3),
    most_scored=st.integers(1, 6),
)
def test_any_mix_ends_with_the_right_tokens_and_each_step_does_something(
    events: list[tuple[object, ...]],
    name: str,
    ageing_s: float,
    spare_blocks: int,
    budget: int,
    chunk: int,
    caching: bool,
    num_tenants: int,
    most_scored: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.core.scheduler.MAX_SCORED_TOKENS", most_scored)
        core = FakeCore(
            policy=policy_of(name, ageing_s),
            num_blocks=8 + spare_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_chunk_tokens=chunk,
            max_model_len=32,
            enable_prefix_caching=caching,
            cost=StepCost(context_per_token=1000.0, short_step_work=6),
        )
        submitted: list[tuple[list[int], int, dict[str, int | None]]] = []
        aborted: set[str] = set()
        is_interrupted = False
        for event in [*events, ("step", 3000)]:
            match event:
                case ("add", list() as prompt, int() as max_tokens, dict() as params, int() as priority, str() as key):
                    core.submit(
                        str(len(submitted)),
                        prompt,
                        max_tokens=max_tokens,
                        params=params,
                        priority=priority,
                        tenant=key if ord(key) - ord("a") < num_tenants else "a",
                        arrived_at=float(len(submitted)),
                    )
                    submitted.append((prompt, max_tokens, params))
                case ("abort", int() as which, branch):
                    assert branch is None or isinstance(branch, int)
                    if core.abort(str(which), branch):
                        aborted.add(str(which))
                    core.lives.check()
                case ("interrupt",):
                    core.interrupt()
                    is_interrupted = True
                case ("step", int() as count):
                    for _ in range(count):
                        if not core.lives.has_work():
                            break
                        step_and_check(core, most_scored, is_interrupted=is_interrupted)
                        is_interrupted = False
        assert not core.lives.has_work()
    for index, (prompt, max_tokens, params) in enumerate(submitted):
        request_id, length = str(index), min(max_tokens, 32 - len(prompt))
        for branch in range(params["n"] or 1):
            produced = core.tokens.get((request_id, branch), [])
            assert produced == expected_tokens(prompt, branch, length)[: len(produced)]
            assert request_id in aborted or len(produced) == length
        if params["prompt_logprobs"] is not None and request_id not in aborted:
            assert core.scored[request_id] == list(range(1, len(prompt))), "each position once, in order"


def step_and_check(core: FakeCore, most_scored: int, *, is_interrupted: bool) -> None:
    """Run one step; it computes something, preempts nobody whom it runs, and scores little while others generate.

    After an interrupted step everybody starts again. What is left to one that is to start is an estimate beside prompt
    logprobs, and beside branches that may copy a block they share: somebody may then have given way needlessly.
    """
    groups = core.lives.groups.values()
    is_exact = not any(group.num_prompt_logprobs_asked or len(group.sequences) > 1 for group in groups)
    generating = [seq for seq in core.scheduler.running if not seq.num_unscored]
    num_scored = sum(map(len, core.scored.values()))
    core.step()
    plan = core.last_plan
    assert plan.num_batched_tokens > 0, "a step without work, while there is some, is followed by endless others"
    if is_interrupted:
        return
    if len(core.scheduler.waiting.tenants) == 1 and is_exact:
        assert not set(plan.preempted_seq_ids) & {new.seq_id for new in plan.new_sequences}
    if generating:
        assert sum(map(len, core.scored.values())) - num_scored <= most_scored


def test_who_fits_beside_earlier_branches_is_not_preempted_for_a_later_request() -> None:
    """Without a prefix cache two branches that wait start in the same step, and take what the later one counted on."""
    core = core_by_priority(
        ageing_s=3.0,
        num_blocks=11,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        max_chunk_tokens=1,
        max_model_len=32,
        enable_prefix_caching=False,
    )
    core.submit("branches", [0] * 4, priority=-1, max_tokens=10, params={"n": 4}, arrived_at=0.0)
    core.submit("short", [0] * 2, max_tokens=1, arrived_at=1.0)
    for _ in range(12):
        core.step()
    core.interrupt()  # all branches wait again, each by itself
    core.submit("beside", [0] * 7, max_tokens=6, params={"n": 2}, arrived_at=2.0)
    core.submit("later", [0] * 17, priority=-2, max_tokens=1, arrived_at=3.0)
    core.step()
    while core.lives.has_work():
        core.step()
        plan = core.last_plan
        assert not set(plan.preempted_seq_ids) & {new.seq_id for new in plan.new_sequences}


def test_sequences_that_run_are_in_order_of_rank() -> None:
    core = core_by_priority(max_num_seqs=8, num_blocks=64)
    for i, priority in enumerate([3, 1, 2, 1, 3]):
        core.submit(str(i), [i], priority=priority, max_tokens=4, params={"n": 1 + i % 2})
    core.step()
    ranks: list[Sequence] = core.scheduler.running
    assert [seq.group.request_id for seq in ranks] == ["1", "1", "3", "3", "2", "0", "4"]
    core.run()
