"""Scheduler and block manager, whatever is asked of them in whatever order, against a naive model.

The model knows what each branch must say, which branches are unfinished, and in which order they are served. After each
operation it is compared with the scheduler, and every block is accounted for.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.core.kv.block_table import NULL_BLOCK
from quire.core.order.policy import policy_of
from quire.core.sequence import Sequence
from quire.messages.output import EngineCoreOutput, FinishReason
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.utils.math import cdiv
from tests.fakes import STATE, WINDOWS, FakeCore, MemoryExecutor, expected_tokens, specs_of

MAX_MODEL_LEN, MAX_CHUNK, BLOCK_SIZE = 32, 7, 4
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=20)
"""Few different tokens, so that prefixes coincide."""
POLICIES = [("fcfs", 0.0), ("priority", 0.0), ("priority", 4.0)]


@dataclass
class Asked:
    """A request, and how far it must be."""

    prompt: list[int]
    answers: list[list[int]]
    """What each branch says from beginning to end."""
    fields: dict[str, Any]
    rank: tuple[float, int]
    given: dict[int, int] = field(default_factory=dict)
    """Tokens that each unfinished branch has given; all branches from the start."""
    is_forked: bool = False


class FailingExecutor(MemoryExecutor):
    """Raises for poisoned requests: before a step, or when it has been computed."""

    def __init__(self, poisoned: dict[str, bool], *layout: Any) -> None:
        """`poisoned`: request -> whether late."""
        super().__init__(*layout)
        self.poisoned = poisoned
        self.fail_on = lambda request_id: poisoned.get(request_id) is False

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        result = super().execute(plan)
        if any(self.poisoned.get(self.sequences[seq_id].request_id) for seq_id in plan.seq_ids):
            raise RuntimeError("poison")
        return result


class SchedulerMachine(RuleBasedStateMachine):
    """Add, step, abort, poison, withdraw, interrupt and move requests."""

    @initialize(
        windows=st.sampled_from(WINDOWS),
        spare_blocks=st.integers(0, 16),
        budget=st.integers(4, 40),
        caching=st.booleans(),
        policy=st.sampled_from(POLICIES),
        blocks_per_state=st.integers(1, 3),
        max_steps_in_flight=st.integers(1, 3),
        is_eager=st.booleans(),
    )
    def build(
        self,
        windows: tuple[int | None, ...],
        spare_blocks: int,
        budget: int,
        caching: bool,
        policy: tuple[str, float],
        blocks_per_state: int,
        max_steps_in_flight: int,
        is_eager: bool,
    ) -> None:
        self.windows, self.policy = windows, policy
        self.options: dict[str, Any] = {
            "num_blocks": sum(spec.most_blocks(MAX_MODEL_LEN, MAX_CHUNK) for spec in specs_of(BLOCK_SIZE, windows))
            + spare_blocks,
            "block_size": BLOCK_SIZE,
            "windows": windows,
            "max_num_seqs": 4,
            "max_num_batched_tokens": budget,
            "max_chunk_tokens": MAX_CHUNK,
            "max_model_len": MAX_MODEL_LEN,
            "enable_prefix_caching": caching,
            "blocks_per_state": blocks_per_state,
            "max_steps_in_flight": max_steps_in_flight,
            "is_eager": is_eager,
            "policy": policy_of(*policy),
        }
        self.poisoned: dict[str, bool] = {}
        """Requests whose steps raise, and whether only when they have been computed."""
        self.core = self.new_core()
        self.asked: dict[str, Asked] = {}
        """Unfinished requests."""
        self.num_added = self.num_asked = self.now = 0

    def new_core(self) -> FakeCore:
        core = FakeCore(**self.options)
        core.executor = FailingExecutor(self.poisoned, self.options["num_blocks"], BLOCK_SIZE, self.windows)
        return core

    # -- operations ------------------------------------------------------------------------------------------------

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 4),
        stops=st.sets(st.integers(0, 49), max_size=6),
        tenant=st.sampled_from("aab"),
        priority=st.integers(-2, 2),
        salt=st.sampled_from([None, "pepper"]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        stops: set[int],
        tenant: str,
        priority: int,
        salt: str | None,
    ) -> None:
        request_id, self.now = str(self.num_asked), self.now + 1
        fields = {"tenant": tenant, "priority": priority, "cache_salt": salt, "arrived_at": float(self.now)}
        length = min(max_tokens, MAX_MODEL_LEN - len(prompt))
        answers = [up_to(expected_tokens(prompt, branch, length), stops) for branch in range(n)]
        self.asked[request_id] = Asked(prompt, answers, fields, self.rank(fields), dict.fromkeys(range(n), 0))
        self.num_asked += 1
        self.num_added += 1
        params = {"n": n, "stop_token_ids": sorted(stops)}
        self.core.submit(request_id, prompt, max_tokens=max_tokens, params=params, **fields)

    def rank(self, fields: dict[str, Any]) -> tuple[float, int]:
        """Lower ones are served first."""
        name, ageing_s = self.policy
        if name == "fcfs":
            return 0.0, self.num_added
        return fields["priority"] + (fields["arrived_at"] / ageing_s if ageing_s else 0.0), self.num_added

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            scheduler = self.core.scheduler
            # With several steps in flight, the flags seen here would be those of a later step than the one that lands.
            first = self.first() if self.core.max_steps_in_flight == 1 else None
            before, had_paused = first.num_computed_tokens if first else 0, scheduler._paused
            self.learn(self.core.step())
            if first is not None and first in scheduler.running:
                pauses = scheduler._paused and not had_paused and first.num_left > 1
                assert first.num_computed_tokens > before or pauses, "the first always gets on"

    def first(self) -> Sequence | None:
        """Who gets on in every step, but for the pauses of a long prompt, which are never two in a row.

        Of the first running ones of all tenants it is the one that was queued first, since priorities hold within a
        tenant only. None while one of its tenant waits that is served before it.
        """
        firsts: dict[str, Sequence] = {}
        for seq in self.core.scheduler.running:
            firsts.setdefault(seq.group.tenant.name, seq)
        oldest = min(firsts.values(), key=lambda seq: (seq.group.number, seq.branch), default=None)
        waiting = oldest.group.tenant.waiting if oldest else []
        return None if waiting and oldest and waiting[0].rank < oldest.rank else oldest

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        request_id = self.chosen(which)
        assert self.core.abort(request_id)
        del self.asked[request_id]

    @precondition(lambda self: any(asked.is_forked for asked in self.asked.values()))
    @rule(which=st.integers(0, 30))
    def abort_a_branch(self, which: int) -> None:
        """As for one in whose text a stop string was found."""
        forked = [request_id for request_id, asked in self.asked.items() if asked.is_forked]
        request_id = forked[which % len(forked)]
        branch = min(self.asked[request_id].given)
        assert self.core.abort(request_id, branch)
        self.ended(request_id, branch)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30), late=st.booleans())
    def poison(self, which: int, late: bool) -> None:
        self.poisoned[self.chosen(which)] = late

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 30))
    def withdraw(self, which: int) -> None:
        self.add_again(self.core.lives.withdraw(self.chosen(which)))

    @rule(computed=st.booleans())
    def interrupt(self, computed: bool) -> None:
        """A step whose result nobody learns of."""
        self.core.interrupt(is_computed=computed)

    @rule()
    def move(self) -> None:
        """All requests go to a new core."""
        requests = [self.core.lives.withdraw(request_id) for request_id in list(self.core.lives.groups)]
        pool = self.core.blocks.pool
        assert pool.num_free == pool.num_blocks
        self.core = self.new_core()
        for request in requests:
            self.add_again(request)

    @rule()
    def forget_all(self) -> None:
        self.core.blocks.pool.forget_all()

    def add_again(self, request: Any) -> None:
        asked = self.asked[request.request_id]
        asked.rank = self.rank(asked.fields)
        self.num_added += 1
        self.core.scheduler.add(request)

    # -- the model -------------------------------------------------------------------------------------------------

    def chosen(self, which: int) -> str:
        return list(self.asked)[which % len(self.asked)]

    def unfinished(self) -> list[Sequence]:
        return [seq for group in self.core.lives.groups.values() for seq in group.sequences.values()]

    def learn(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            asked, request_id = self.asked[output.request_id], output.request_id
            answer, count = asked.answers[output.branch], asked.given[output.branch]
            assert output.new_token_ids == answer[count : count + len(output.new_token_ids)]
            asked.given[output.branch] = count = count + len(output.new_token_ids)
            asked.is_forked = asked.is_forked or count > 0
            if output.finish_reason is FinishReason.ERROR:
                assert request_id in self.poisoned, output.error
            else:
                assert (output.finish_reason is not None) == (count == len(answer))
            if output.finish_reason is not None:
                self.ended(request_id, output.branch)

    def ended(self, request_id: str, branch: int) -> None:
        del self.asked[request_id].given[branch]
        if not self.asked[request_id].given:
            del self.asked[request_id]

    def teardown(self) -> None:
        for _ in range(5000):
            if not self.asked:
                break
            self.learn(self.core.step())
        assert not self.asked, "requests did not end"
        self.core.run()

    # -- after each operation --------------------------------------------------------------------------------------

    @invariant()
    def the_scheduler_has_what_the_model_has(self) -> None:
        groups = self.core.lives.groups
        assert groups.keys() == self.asked.keys()
        for request_id, asked in self.asked.items():
            sequences = groups[request_id].sequences
            if asked.is_forked:
                tokens = {branch: seq.token_ids[len(asked.prompt) :] for branch, seq in sequences.items()}
                assert tokens == {branch: asked.answers[branch][:count] for branch, count in asked.given.items()}
            else:
                assert [seq.num_to_fork for seq in sequences.values()] == [len(asked.answers)]

    @invariant()
    def everybody_stands_in_the_right_place(self) -> None:
        scheduler = self.core.scheduler
        queues = [tenant.waiting for tenant in scheduler.waiting.tenants.values()]
        for line in (scheduler.running, *queues):
            ranks = [(*self.asked[seq.group.request_id].rank, seq.branch) for seq in line]
            assert ranks == sorted(ranks)
        assert sum(seq.num_to_fork for seq in scheduler.running) <= 4

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.core.lives.check()
        held = {block_id for seq in self.unfinished() for table in seq.tables for block_id in table.held}
        pool = self.core.blocks.pool
        assert pool.num_free + len(held) == pool.num_blocks
        if not self.core.in_flight:  # else some have blocks for tokens that are not computed yet
            for seq in self.core.scheduler.running:
                self.holds_what_it_reads(seq)

    def holds_what_it_reads(self, seq: Sequence) -> None:
        for table, window in zip(seq.tables, self.windows, strict=True):
            if window == STATE:
                assert len(table.held) == len(table.block_ids) == min(1, seq.num_computed_tokens)
                continue
            first = 0 if window is None else max(0, seq.num_computed_tokens - window + 1) // BLOCK_SIZE
            assert table.block_ids[:first] == [NULL_BLOCK] * first, "blocks that nobody reads are given back"
            assert table.held == table.block_ids[first : cdiv(seq.num_computed_tokens, BLOCK_SIZE)]

    @invariant()
    def cached_blocks_hold_what_they_are_found_by(self) -> None:
        slots, states = self.core.executor.slots, self.core.executor.states
        for block in self.core.blocks.pool.blocks:
            if block.content is not None and self.windows[block.group] == STATE:
                group, token_ids = states[block.block_id] or (None, ())
                assert (group, token_ids[-BLOCK_SIZE:]) == (block.group, block.content[2])
                assert len(token_ids) % self.core.blocks.state_stride == 0
            elif block.content is not None:
                there = slots[block.block_id * BLOCK_SIZE : (block.block_id + 1) * BLOCK_SIZE]
                assert tuple(slot and (slot[0], slot[2]) for slot in there) == tuple(
                    (block.group, token_id) for token_id in block.content[2]
                )


def up_to(token_ids: list[int], stops: set[int]) -> list[int]:
    """The tokens up to the first that ends them."""
    ends = [index + 1 for index, token_id in enumerate(token_ids) if token_id in stops]
    return token_ids[: ends[0]] if ends else token_ids


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def built(**options: Any) -> SchedulerMachine:
    machine = SchedulerMachine()
    machine.build(
        **{
            "windows": (None,),
            "spare_blocks": 8,
            "caching": True,
            "blocks_per_state": 1,
            "budget": 4,
            "max_steps_in_flight": 1,
            "is_eager": False,
            **options,
        }
    )
    return machine


def add(machine: SchedulerMachine, prompt: list[int], tenant: str, priority: int, **fields: Any) -> None:
    machine.add(
        **{"prompt": prompt, "stops": set(), "tenant": tenant, "priority": priority, "salt": None, "n": 1, **fields}
    )


def progress(machine: SchedulerMachine, request_id: str) -> int:
    """Tokens of a request that are computed."""
    return max(seq.num_computed_tokens for seq in machine.core.lives.groups[request_id].sequences.values())


def test_the_long_prompt_of_the_first_pauses_beside_short_ones_but_not_twice_in_a_row() -> None:
    machine = built(budget=12, policy=("priority", 4.0))
    add(machine, [2, 2, 1], "b", 0, n=3, max_tokens=11)
    machine.step(count=2)
    add(machine, [0, 1] * 10, "b", -2, n=3, max_tokens=8)
    computed = [0]
    for _ in range(5):
        machine.step(count=1)
        computed.append(progress(machine, "1"))
    gained = [after > before for before, after in itertools.pairwise(computed)]
    assert gained == [True, True, False, True, True]
    machine.teardown()


def test_of_several_tenants_the_one_whose_first_was_queued_first_gets_on_whatever_the_priorities() -> None:
    machine = built(policy=("priority", 0.0), spare_blocks=3)
    add(machine, [0, 2, 1, 2, 1, 2, 1, 1, 1], "a", -1, max_tokens=1)
    add(machine, [2, 0, 1, 1, 2, 0, 1, 0, 2, 2], "b", -1, n=2, max_tokens=8)
    add(machine, [2, 2], "b", -2, n=2, max_tokens=11)
    firsts = []
    while "0" in machine.asked:
        first = machine.first()
        firsts.append(first and first.group.request_id)
        machine.step(count=1)
    assert firsts[0] is None
    assert set(firsts[1:]) == {"0"}
    machine.teardown()
