"""Stand-ins at the seams: an executor that checks memory instead of running a model, and small configurations."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

from quire.core.kv.block_manager import BlockManager
from quire.core.kv.tiers import KVTiers
from quire.core.order.budget import StepCost
from quire.core.order.policy import FirstComeFirstServed
from quire.core.scheduler import Scheduler
from quire.engine.quarantine import execute_guarded
from quire.messages.kv import FullAttentionSpec, KVCacheSpec, PageSpec, SlidingWindowSpec, StatePage, StateSpec
from quire.messages.kv_tiers import PageContent
from quire.messages.output import EngineCoreOutput, PositionLogprobs
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.step import BlockChange, ModelRunnerOutput, NewSequenceData, SchedulerOutputs
from quire.sampling_params import SamplingParams

VOCAB_SIZE = 50
STATE = 0
"""In place of a window: the group of recurrent layers, which keep one state."""
WINDOWS: list[tuple[int | None, ...]] = [
    (None,),
    (5,),
    (None, 6),
    (None, 1, 9),
    (3, 8),
    (None, None, 4),
    (STATE,),
    (None, STATE),
    (4, STATE, STATE),
]
"""Of each KV group: one group, several of one kind, several kinds; None sees everything."""


def next_token(token_ids: list[int], branch: int) -> int:
    """What the fake model says after these tokens: a function of all of them and of the branch, nothing else."""
    digest = blake2b(repr((token_ids, branch)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB_SIZE


def expected_tokens(prompt: list[int], branch: int, num_tokens: int) -> list[int]:
    """What a branch must produce, whatever else runs."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, branch))
    return token_ids[len(prompt) :]


@cache
def next_logprobs(token_ids: tuple[int, ...]) -> list[float]:
    """How likely the fake model finds each token after these: a function of all of them and of nothing else."""
    seed = blake2b(repr(token_ids).encode(), digest_size=8).digest()
    rng = random.Random(int.from_bytes(seed, "big"))
    logits = [rng.gauss(0.0, 2.0) for _ in range(VOCAB_SIZE)]
    total = math.log(sum(map(math.exp, logits)))
    return [logit - total for logit in logits]


def _reported(token_ids: list[int], count: int) -> PositionLogprobs:
    """As the worker reports the most likely tokens of a greedy row."""
    logprobs = next_logprobs(tuple(token_ids))
    best = sorted(range(VOCAB_SIZE), key=lambda token_id: -logprobs[token_id])[:count]
    return PositionLogprobs(token_ids=best, logprobs=[logprobs[token_id] for token_id in best], rank=1)


def specs_of(block_size: int, windows: Sequence[int | None] = (None,)) -> list[KVCacheSpec]:
    """A KV group for each window; None sees everything."""
    page = PageSpec(num_kv_heads=1, head_size=8, dtype="float32", block_size=block_size)
    state = StatePage(num_elements=9, num_bytes=page.num_bytes, block_size=block_size)
    return [
        StateSpec(page=state)
        if window == STATE
        else FullAttentionSpec(page=page)
        if window is None
        else SlidingWindowSpec(page=page, window=window)
        for window in windows
    ]


class MemoryExecutor:
    """Keeps who wrote it in every slot of every page, and checks that each token finds all that it reads there."""

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)) -> None:
        """A KV group for each window; None sees everything."""
        self.block_size = block_size
        self.windows = windows
        self.slots: list[tuple[int, int, int] | None] = [None] * (num_blocks * block_size)
        """(group, position, token)."""
        self.states: dict[int, tuple[int, tuple[int, ...]] | None] = {}
        """By page: the group, and the tokens before."""
        self.requests: dict[str, EngineCoreRequest] = {}
        self.sequences: dict[int, NewSequenceData] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.drawn: dict[int, int] = {}
        """By sequence, the token drawn last."""
        self.tables: dict[int, list[dict[int, int]]] = {}
        """By sequence and group: index -> block, those that the worker was told of."""
        self.lost: list[str] = []
        """What sequences did not find; a failing step is run again, so an exception alone may go unseen."""
        self.fail_on: Callable[[str], bool] = lambda request_id: False
        self.num_steps = 0
        self.pages: dict[int, tuple[PageContent, Any]] = {}
        """What is in the slots of tiers."""
        self.corrupt: set[int] = set()
        """Slots whose pages do not have the digest that they should have."""
        self.skipped_saves: set[int] = set()
        """Blocks that are not saved, as if a fault had struck."""

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        self.num_steps += 1
        self._save(plan)
        self._apply(plan)
        try:
            result = self._compute(plan)
        finally:
            failed_loads = self._load(plan)  # as late as they may come
        result.failed_loads = failed_loads
        return result

    def capture_graph(self) -> bool:
        return False

    def _save(self, plan: SchedulerOutputs) -> None:
        for source, slot, content in plan.pages_to_move:
            if self._keeps(source, content) and not self._keeps(slot, content):
                self.pages[slot] = self.pages[source]
                (self.corrupt.add if source in self.corrupt else self.corrupt.discard)(slot)
        for block_id, slot, content in plan.blocks_to_swap_out:
            if block_id not in self.skipped_saves and not self._keeps(slot, content):
                self.pages[slot] = content, self._bytes_of(block_id)
                self.corrupt.discard(slot)

    def _load(self, plan: SchedulerOutputs) -> list[int]:
        failed = []
        for slot, block_id, content in plan.blocks_to_swap_in:
            if self._keeps(slot, content) and slot not in self.corrupt:
                self.slots[self._page(block_id)], self.states[block_id] = self.pages[slot][1]
            else:
                failed.append(block_id)
        return failed

    def _keeps(self, slot: int, content: PageContent) -> bool:
        return slot in self.pages and self.pages[slot][0] == content

    def _bytes_of(self, block_id: int) -> tuple[Any, Any]:
        """All that a page holds: it may be of any group."""
        return self.slots[self._page(block_id)], self.states.get(block_id)

    def _page(self, block_id: int) -> slice:
        return slice(block_id * self.block_size, (block_id + 1) * self.block_size)

    def _compute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        if any(self.fail_on(self.sequences[i].request_id) for i in plan.seq_ids):
            raise RuntimeError("poison")
        result = ModelRunnerOutput()
        for seq_id, computed, count in zip(
            plan.seq_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            self._write(self.sequences[seq_id], computed, count)
        for seq_id, computed, count, num_draws in zip(
            plan.seq_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, plan.num_draws, strict=True
        ):
            seq, token_ids = self.sequences[seq_id], self.token_ids[seq_id]
            self._read(seq, computed, count)
            assert (num_draws > 0) == (computed + count == len(token_ids))
            drawn = [next_token(token_ids, seq.branch + i) for i in range(num_draws)]
            self.drawn[seq_id] = drawn[0] if drawn else 0
            result.token_ids.append(drawn if num_draws == 1 else [])
            if num_draws > 1:
                result.forks[seq_id] = drawn
            scored = self._score(seq, computed, count)
            if scored:
                result.prompt_logprobs[seq_id] = scored
            num_logprobs = self.requests[seq.request_id].num_logprobs
            if num_draws and num_logprobs is not None:
                result.logprobs[seq_id] = [_reported(token_ids, num_logprobs)] * num_draws
        return result

    def _score(self, seq: NewSequenceData, computed: int, count: int) -> list[PositionLogprobs]:
        """What a worker gives of a prompt's logprobs; the rank tells the position."""
        request = self.requests[seq.request_id]
        if request.sampling_params.prompt_logprobs is None:
            return []
        last = min(computed + count, len(request.prompt_token_ids) - 1)
        rows = range(max(computed, seq.num_prompt_logprobs), last)
        return [PositionLogprobs(token_ids=[0], logprobs=[0.0], rank=row + 1) for row in rows]

    def close(self) -> None:
        self.sequences.clear()

    def _write(self, seq: NewSequenceData, computed: int, count: int) -> None:
        for group, window in enumerate(self.windows):
            if window == STATE:
                page = self.tables[seq.seq_id][group][1]
                self.states[page] = self._state(seq, group, computed + count)
                self.slots[self._page(page)] = [None] * self.block_size
                continue
            for position in range(computed, computed + count):
                slot = self._slot(seq, group, position)
                self.slots[slot] = group, position, self.token_ids[seq.seq_id][position]
                self.states.pop(slot // self.block_size, None)

    def _read(self, seq: NewSequenceData, computed: int, count: int) -> None:
        for group, window in enumerate(self.windows):
            if window == STATE:
                self._read_state(seq, group, computed)
                continue
            first = 0 if window is None else max(0, computed - window + 1)
            for position in range(first, computed + count):
                found = self.slots[self._slot(seq, group, position)]
                if found != (group, position, self.token_ids[seq.seq_id][position]):
                    self._lose(f"{seq.request_id}/{seq.branch}: {found} at {position} in group {group}")

    def _read_state(self, seq: NewSequenceData, group: int, computed: int) -> None:
        """The page to read is there still when all of the step have written theirs: a step may be run again."""
        found = self.states.get(self.tables[seq.seq_id][group][0]) if computed else self._state(seq, group, 0)
        if found != self._state(seq, group, computed):
            self._lose(f"{seq.request_id}/{seq.branch}: state {found} in group {group}")

    def _state(self, seq: NewSequenceData, group: int, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """What a state after so many tokens depends on."""
        return group, tuple(self.token_ids[seq.seq_id][:num_tokens])

    def _lose(self, what: str) -> None:
        self.lost.append(what)
        raise AssertionError(what)

    def _apply(self, plan: SchedulerOutputs) -> None:
        for seq_id in plan.removed_seq_ids:
            self.sequences.pop(seq_id, None)
            self.token_ids.pop(seq_id, None)
        for request_id in plan.removed_request_ids:
            self.requests.pop(request_id, None)
        for request in plan.new_requests:
            self.requests[request.request_id] = request
        for new in plan.new_sequences:
            self.sequences[new.seq_id] = new
            self.token_ids[new.seq_id] = [*self.requests[new.request_id].prompt_token_ids, *new.output_token_ids]
            self.tables[new.seq_id] = [{} for _ in self.windows]
            self._learn(new.seq_id, new.block_ids)
        for seq_id, (position, token_ids) in plan.new_token_ids.items():
            self.token_ids[seq_id][position:] = token_ids
        for seq_id, position in plan.pending_tokens.items():
            assert len(self.token_ids[seq_id]) in (position, position + 1)
            if len(self.token_ids[seq_id]) == position:
                self.token_ids[seq_id].append(self.drawn[seq_id])
        for seq_id, changes in plan.new_block_ids.items():
            self._learn(seq_id, changes)
        for source, destination in plan.blocks_to_copy:
            self.slots[self._page(destination)] = self.slots[self._page(source)]

    def _learn(self, seq_id: int, changes: list[BlockChange]) -> None:
        for table, (first, block_ids) in zip(self.tables[seq_id], changes, strict=True):
            table.update(enumerate(block_ids, first))

    def _slot(self, seq: NewSequenceData, group: int, position: int) -> int:
        block_id = self.tables[seq.seq_id][group][position // self.block_size]
        return block_id * self.block_size + position % self.block_size


class FakeCore:
    """A real scheduler and block manager over a `MemoryExecutor`; checks every invariant after each step."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        enable_prefix_caching: bool = True,
        tick_s: float = 1.0,
        tiers: Sequence[int] = (),
        min_load_tokens: int = 1,
        blocks_per_state: int = 1,
        max_steps_in_flight: int = 1,
        is_eager: bool = False,
        **limits: Any,
    ) -> None:
        """`is_eager`: a step is computed when it is decided, else when its result is wanted."""
        defaults = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": num_blocks * block_size,
            "max_chunk_tokens": 32,
            "policy": FirstComeFirstServed(),
            "cost": StepCost(context_per_token=1000.0),
        }
        limits = {**defaults, **limits}
        self.blocks = BlockManager(
            num_blocks,
            specs_of(block_size, windows),
            max_chunk_tokens=limits["max_chunk_tokens"],
            enable_prefix_caching=enable_prefix_caching,
            state_stride=block_size * blocks_per_state if enable_prefix_caching and STATE in windows else 0,
            tiers=KVTiers(tiers, min_load_tokens=min_load_tokens) if tiers else None,
        )
        ticks = itertools.count()
        self.scheduler = Scheduler(self.blocks, **limits, clock=lambda: next(ticks) * tick_s)
        self.lives = self.scheduler.lives
        self.executor = MemoryExecutor(num_blocks, block_size, windows)
        self.max_steps_in_flight = max_steps_in_flight
        self.is_eager = is_eager
        self.in_flight: deque[tuple[SchedulerOutputs, Callable[[], ModelRunnerOutput]]] = deque()
        self.num_ahead = 0
        """Steps that were decided while another was in flight."""
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], EngineCoreOutput] = {}
        self.scored: dict[str, list[int]] = {}
        """The prompt positions whose logprobs were reported, by request."""
        self.last_plan = SchedulerOutputs()
        self.known_requests: set[str] = set()

    def submit(self, request_id: str, prompt: list[int], *, max_tokens: int = 4, **fields: Any) -> None:
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 1.0, **fields.pop("params", {})})
        self.scheduler.add(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=params,
                seed=0,
                max_tokens=max_tokens,
                **fields,
            )
        )

    def abort(self, request_id: str, branch: int | None = None) -> bool:
        return self.lives.abort(AbortRequest(request_id=request_id, branch=branch))

    def plan(self) -> SchedulerOutputs:
        """Decide a step."""
        self.last_plan = plan = self.scheduler.schedule()
        self.known_requests.difference_update(plan.removed_request_ids)
        new = {request.request_id for request in plan.new_requests}
        assert not self.known_requests & new, "a request crosses once"
        self.known_requests |= new
        return plan

    def submit_step(self) -> None:
        """Decide a step and hand it over."""
        self.num_ahead += bool(self.in_flight)
        plan = self.plan()
        if self.is_eager:
            result = execute_guarded(self.executor, plan)
            self.in_flight.append((plan, lambda: result))
        else:
            self.in_flight.append((plan, lambda: execute_guarded(self.executor, plan)))

    def interrupt(self, *, is_computed: bool = False) -> SchedulerOutputs:
        """Decide a step whose result nobody learns of; `is_computed` or not."""
        while self.in_flight:
            _, compute = self.in_flight.popleft()
            compute()
        plan = self.plan()
        if is_computed:
            execute_guarded(self.executor, plan)
        self.scheduler.interrupted()
        return plan

    def step(self) -> list[EngineCoreOutput]:
        while not self.in_flight or (len(self.in_flight) < self.max_steps_in_flight and self.scheduler.may_go_ahead()):
            self.submit_step()
        plan, compute = self.in_flight.popleft()
        outputs = self.scheduler.update(plan, compute())
        assert not self.executor.lost, self.executor.lost
        for output in outputs:
            key = (output.request_id, output.branch)
            assert key not in self.finished, f"{key} speaks after its end"
            self.tokens.setdefault(key, []).extend(output.new_token_ids)
            self.scored.setdefault(key[0], []).extend(entry.rank for entry in output.new_prompt_logprobs or ())
            if output.finish_reason is not None:
                self.finished[key] = output
        self.lives.check()
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.lives.has_work():
                break
            self.step()
        assert not self.lives.has_work(), "requests did not finish"
        while self.in_flight:
            plan, compute = self.in_flight.popleft()
            assert not self.scheduler.update(plan, compute())
        self.lives.writer.begin()
        plan = self.lives.writer.end()
        self.known_requests.difference_update(plan.removed_request_ids)
        self.executor.execute(plan)
        assert not self.executor.requests, "the worker keeps requests that have ended"
        pool = self.blocks.pool
        assert pool.num_free == pool.num_blocks, "blocks leaked"
