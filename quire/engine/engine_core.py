"""`EngineCore`: the hub. A step is: decide, compute, learn."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

from quire.config.engine import CacheConfig, QuireConfig
from quire.config.memory.weights.shapes import context_per_token, window_shares
from quire.core.kv.block_manager import BlockManager
from quire.core.kv.tiers import KVTiers
from quire.core.order.budget import SHORT_STEP_WORK, StepCost
from quire.core.order.policy import policy_of
from quire.core.record.activity import activity_of
from quire.core.scheduler import Scheduler
from quire.engine.flight import Flight
from quire.engine.identity import Identity, identity_of
from quire.engine.preparations import Preparations
from quire.errors import counted
from quire.executor.base import Executor
from quire.log import get_logger
from quire.messages.kv_tiers import FLUSH_S, TierReport
from quire.messages.output import EngineCoreOutputs
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.stats import Activity, StepStats
from quire.messages.step import SchedulerOutputs
from quire.observability.console import StatusLine
from quire.observability.flight_recorder import FlightRecorder
from quire.structured.grammar import Vocabulary

log = get_logger(__name__)

PAGES_AT_ONCE = 32
"""Written between two looks at the clock when the engine is closed: some 50 MB of a model of 0.6B parameters."""


class EngineCore:
    """Scheduler, blocks and executor of one engine. Knows no text."""

    def __init__(
        self,
        config: QuireConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        identity: Identity | None = None,
    ) -> None:
        """`identity` says which weights the executor has; None for one that has none."""
        cache, limits = config.cache_config, config.scheduler_config
        self.executor = executor
        self.identity = identity_of(config, weights="") if identity is None else identity
        """What it computes."""
        self._keeps_pages = False
        """Whether there is a file that the next engine can find pages in."""
        self.log_stats = config.observability_config.log_stats
        interval_s = config.observability_config.log_stats_interval_s
        self.on_quarantine: Callable[[], None] = lambda: None
        """Called when a request has failed by a fault that may be the engine's."""
        self._status = StatusLine(interval_s, clock) if self.log_stats and interval_s else None
        self.scheduler = Scheduler(
            BlockManager(
                cache.num_blocks,
                [group.spec for group in config.kv_layout.groups],
                max_chunk_tokens=limits.max_chunk_tokens,
                enable_prefix_caching=cache.enable_prefix_caching,
                engine_digest=self.identity.digest,
                tiers=self._open_tiers(config),
                state_stride=cache.state_checkpoint_stride,
            ),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=config.model_config.max_model_len,
            max_chunk_tokens=limits.max_chunk_tokens,
            clock=clock,
            policy=policy_of(limits.policy, limits.priority_ageing_s),
            cost=_cost_of(config),
        )
        self.lives = self.scheduler.lives
        self._flight = Flight(limits.max_steps_in_flight)
        self._preparations = Preparations(self.lives.groups, executor)

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a validated request. If it has a grammar, `use_vocabulary` came before."""
        if self._status is not None and not self.has_work():
            self._status.resume(self._totals)
        self.scheduler.add(request)
        if request.grammar is not None:
            self._preparations.add(request, request.grammar)

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of the model's tokens. Grammars need them, and this process has no tokenizer."""
        self.executor.use_vocabulary(vocabulary)

    def abort(self, abort: AbortRequest) -> bool:
        """Drop a request or one of its branches, at once; False when it is not here."""
        return self.lives.abort(abort)

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.lives.has_work()

    @property
    def num_in_flight(self) -> int:
        """Steps that were decided and not learnt from yet."""
        return len(self._flight)

    def settle(self) -> None:
        """Come back when nothing is being computed: if a step in flight ends the process, it has."""
        self._flight.wait()

    def capture_graph(self) -> bool:
        """Use a gap between requests; see `Executor.capture_graph`. Only while there is no work."""
        self.settle()
        return self.executor.capture_graph()

    def step(self) -> EngineCoreOutputs:
        """Run one step and say what is new: nothing after a short while in which all requests wait for grammars."""
        if not self._preparations.let_start():
            return EngineCoreOutputs(stepped_at=self.scheduler.stepped_at)
        try:
            while not self._flight or (self._flight.has_room and self.scheduler.may_go_ahead()):
                self._flight.submit(self.executor, self.scheduler.schedule())  # 1. decide
            plan, result = self._flight.land()  # 2. compute
            outputs = self.scheduler.update(plan, result)  # 3. learn
        except BaseException:
            self._flight.abandon()
            self.scheduler.interrupted()
            raise
        if any(not failure.is_request_fault for failure in result.errors.values()):
            self.on_quarantine()
        stats = self.scheduler.stats(plan) if self.log_stats else None
        return EngineCoreOutputs(outputs=outputs, stepped_at=self.scheduler.stepped_at, stats=stats)

    def stats(self) -> StepStats | None:
        """How full the engine is between steps; None when statistics are off."""
        return self._totals() if self.log_stats else None

    def activity(self, tenant: str) -> Activity:
        """What a tenant's requests do now, for people who watch; bounded."""
        return activity_of(self.scheduler, tenant)

    def report(self) -> None:
        """Log a status line if one is due; for loops that step while others watch."""
        if self._status is not None:
            self._status.tick(self._totals)

    def _totals(self) -> StepStats:
        return self.scheduler.stats(SchedulerOutputs())

    def record_in(self, memory: mmap.mmap) -> None:
        """Keep the flight recorder's records in memory that others can read; before the first request."""
        self.lives.timelines.recorder = FlightRecorder(memory)

    def recording(self) -> bytes:
        """The records of the last steps and requests, for `chrome_trace`."""
        return self.lives.timelines.recorder.snapshot()

    def finished_requests(self) -> bytes:
        """When the last requests came and how long they were, for `finished_since`."""
        return self.lives.timelines.finished_requests.snapshot()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep what they use."""
        self.scheduler.blocks.forget_cached()
        if self.scheduler.blocks.tiers is not None:
            self.settle()
            self.executor.clear_kv_tiers()

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Keep what the next engine can use, for `flush_s` seconds at most, and shut the executor down. Idempotent."""
        try:
            self._flight.close()
            if self._keeps_pages:
                self._keeps_pages = False
                self._flush(time.monotonic() + flush_s)
        finally:
            self.executor.close()

    def _open_tiers(self, config: QuireConfig) -> KVTiers | None:
        """The tiers that the configuration asks for; None where loading from them would save no time."""
        cache = config.cache_config
        sizes = [size for size in (cache.num_ram_slots, cache.num_disk_slots) if size]
        if not sizes:
            return None
        report = self.executor.open_kv_tiers(self.identity.digest)
        least = report.break_even if cache.kv_load_min_tokens is None else cache.kv_load_min_tokens
        _say_what_is_loaded(report, least, cache)
        if least is None:
            return None
        self._keeps_pages = cache.num_disk_slots > 0
        tiers = KVTiers(sizes, min_load_tokens=least)
        for slot, content in report.pages:
            tiers.found(slot, content)
        return tiers

    def _flush(self, until: float) -> None:
        """Bring what is cached to the file, a few pages at a time, those used last first."""
        blocks, began_at = self.scheduler.blocks, time.monotonic()
        if blocks.tiers is None or blocks.is_moving:  # a step was interrupted: nobody knows what is where
            return
        pages = blocks.tiers.pages_to_flush(blocks.pool.cached_contents())
        kept: set[int] = set()
        num_written, in_time = 0, time.monotonic() < until
        while in_time and (count := blocks.tiers.flush(pages, kept, PAGES_AT_ONCE)):
            plan = SchedulerOutputs()
            blocks.write_moves(plan)
            self.executor.execute(plan)
            blocks.moves_ended([])
            num_written, in_time = num_written + count, time.monotonic() < until
        log.info(
            "wrote %s to the --kv-disk file in %.1f s, %d were there%s",
            counted(num_written, "cached KV page"),
            time.monotonic() - began_at,
            len(kept) - num_written,
            "" if in_time else f"; {sum(1 for _ in pages)} left out for want of time",
        )


def _cost_of(config: QuireConfig) -> StepCost:
    arch, work = config.model_config.arch, config.scheduler_config.short_step_work
    return StepCost(context_per_token(arch), window_shares(arch), SHORT_STEP_WORK if work is None else work)


def _say_what_is_loaded(report: TierReport, least: int | None, cache: CacheConfig) -> None:
    where = f"{cache.num_ram_slots} KV pages in memory, {cache.num_disk_slots} in a file ({len(report.pages)} found)"
    costs = f"loading {report.load_token_s * 1e6:.1f} us a token, computing {report.compute_token_s * 1e6:.1f} us"
    if least is None:
        log.warning("%s are not used: %s. --kv-load-min-tokens loads in spite of it", where, costs)
    else:
        log.info("%s: %s, so prefixes of %d tokens and more are loaded", where, costs, least)
