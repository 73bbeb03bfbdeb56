"""`Replica`: one engine core of a simulation, with a clock of its own."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

from quire.config.engine import ObservabilityConfig, QuireConfig
from quire.engine.engine_core import EngineCore
from quire.engine.identity import Identity, identity_of
from quire.messages.output import EngineCoreOutput
from quire.messages.request import EngineCoreRequest
from quire.messages.stats import RequestStats
from quire.observability.flight_recorder import SIZE
from quire.simulation.clock import VirtualClock
from quire.simulation.cost_model import CostModel, StepShape
from quire.simulation.decode_run import DecodeRun, plan_run
from quire.simulation.executor import SimExecutor
from quire.simulation.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request that has ended."""

    request_id: str
    stats: RequestStats
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Hardware:
    """What all replicas of a simulation have in common."""

    config: QuireConfig
    cost: CostModel
    identity: Identity
    records: mmap.mmap
    """Memory for the flight recorders of all of them, which nobody reads."""
    skips_steps: bool
    """Whether runs of steps in which nothing is decided are computed at once."""


def hardware_of(config: QuireConfig, cost: CostModel, *, skips_steps: bool = True) -> Hardware:
    """What replicas with a configuration have in common."""
    silent = replace(config, observability_config=ObservabilityConfig(log_stats=False))
    return Hardware(silent, cost, identity_of(config, weights=""), mmap.mmap(-1, SIZE), skips_steps)


class Replica:
    """A core and what is on its way to it. Whoever drives it calls `wake` at the moments that it names."""

    executor_type = SimExecutor

    def __init__(self, hardware: Hardware) -> None:
        self.clock = VirtualClock()
        self.usage = Usage()
        config = hardware.config
        executor = self.executor_type(self.clock, hardware.cost, config.cache_config.num_blocks, self.count_step)
        self._batches = executor.batches
        self.core = EngineCore(config, executor, self.clock, hardware.identity)
        self.core.record_in(hardware.records)
        self.scheduler = self.core.scheduler
        self.wakes_at: float | None = None
        """When its present step, or run of steps, ends; None while it has nothing to do."""
        self._hardware = hardware
        self.inbox: list[EngineCoreRequest] = []
        """Requests that wait for the end of the present step."""
        self._outputs: list[EngineCoreOutput] = []
        """Of the present step."""
        self._run: DecodeRun | None = None
        self._num_left: dict[str, int] = {}
        """Branches that have not ended, by request."""

    def send(self, request: EngineCoreRequest) -> float:
        """A request arrives. Gives the moment at which the replica is to be woken, which may be earlier than before."""
        moment = request.arrived_at
        self.inbox.append(request)
        if self._run is not None:
            self._run.interrupt(moment)
            self.wakes_at = self._run.ends_at
        elif self.wakes_at is None:
            self.clock.wait_until(moment)
            self._batches.idle()
            self.wakes_at = self.clock.now
        return self.wakes_at

    def wake(self) -> list[Finished]:
        """End the present step and begin the next one; `wakes_at` is its end. Gives what has ended."""
        finished = self._end_step()
        for request in self.admit():
            self._num_left[request.request_id] = request.sampling_params.n
            self.core.add(request)
        self.wakes_at = self._begin_step() if self.core.has_work() else None
        return finished

    def admit(self) -> list[EngineCoreRequest]:
        """Take those out of the inbox that go to the scheduler now: all."""
        admitted, self.inbox = self.inbox, []
        return admitted

    def _begin_step(self) -> float:
        hardware = self._hardware
        if hardware.skips_steps:
            length = hardware.config.model_config.max_model_len
            self._run = plan_run(self.scheduler, hardware.cost, self._batches, length, self.clock.now)
            if self._run is not None:
                return self._run.ends_at
        self._outputs = self.core.step().outputs
        return self.clock.now

    def _end_step(self) -> list[Finished]:
        if self._run is not None:
            self._run.commit(self.usage)
            self._batches.repeat(self._run.num_steps)
            self.clock.now = self._run.ends_at
            self._run = None
        outputs, self._outputs = self._outputs, []
        return [found for output in outputs if (found := self._finished(output)) is not None]

    def _finished(self, output: EngineCoreOutput) -> Finished | None:
        """The request, if this was its last branch."""
        if output.finish_reason is None:
            return None
        name = output.request_id
        self._num_left[name] -= 1
        if self._num_left[name]:
            return None
        del self._num_left[name]
        assert output.stats is not None, output
        return Finished(request_id=name, stats=output.stats, num_cached_tokens=output.num_cached_tokens)

    def count_step(self, shape: StepShape, seconds: float) -> None:
        """A step is made; its sequences have their blocks."""
        pool = self.scheduler.blocks.pool
        num_tokens = sum(seq.num_committed_tokens for seq in self.scheduler.running) + shape.num_tokens
        self.usage.add(pool.num_blocks - pool.num_free, num_tokens, seconds)
