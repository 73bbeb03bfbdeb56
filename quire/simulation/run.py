"""Drive replicas over a trace, event by event."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.config.engine import QuireConfig
from quire.simulation.cost_model import CostModel
from quire.simulation.replica import Finished, Replica, hardware_of
from quire.simulation.routing import Router
from quire.simulation.trace import Prompts, TraceRequest

REPORT_EVERY = 1000
"""Requests between two calls of `on_progress`."""
OnProgress = Callable[[int, int, int], None]
"""Hears (requests finished, prompt tokens, output tokens)."""


@dataclass(slots=True)
class Result:
    """What became of one request. Times are seconds of the trace."""

    arrived_at: float
    first_token_at: float
    ended_at: float
    num_output_tokens: int
    """Of each branch."""
    num_preemptions: int
    num_cached_tokens: int
    replica: int

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_token_at - self.arrived_at

    @property
    def e2el(self) -> float:
        """Seconds to the last token."""
        return self.ended_at - self.arrived_at

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None when there is none."""
        rest = self.num_output_tokens - 1
        return (self.ended_at - self.first_token_at) / rest if rest else None


@dataclass(slots=True)
class Outcome:
    """A simulation that has ended."""

    results: list[Result]
    """In the order of the trace."""
    replicas: list[Replica]


def simulate(
    config: QuireConfig,
    cost: CostModel,
    requests: Sequence[TraceRequest],
    router: Router,
    *,
    num_replicas: int = 1,
    skips_steps: bool = True,
    replica_type: type[Replica] = Replica,
    on_progress: OnProgress = lambda finished, prompt, output: None,
) -> Outcome:
    """Run a trace, which is in order of arrival, on replicas that are alike.

    At one moment arrivals come first, then the ends of steps in the order of the replicas: a step that begins as a
    request arrives has it.
    """
    hardware = hardware_of(config, cost, skips_steps=skips_steps)
    replicas = [replica_type(hardware) for _ in range(num_replicas)]
    return _Simulation(replicas, requests, router, on_progress).run()


class _Simulation:
    """The events of a simulation."""

    def __init__(
        self, replicas: list[Replica], requests: Sequence[TraceRequest], router: Router, on_progress: OnProgress
    ) -> None:
        self._replicas = replicas
        self._requests = requests
        self._router = router
        self._on_progress = on_progress
        self._prompts = Prompts()
        self._loads = [0] * len(replicas)
        self._events: list[tuple[float, int]] = []
        """(moment, replica); stale where the replica does not wake then."""
        self._results: list[Result | None] = [None] * len(requests)
        self._num_finished = self._num_prompt_tokens = self._num_output_tokens = 0

    def run(self) -> Outcome:
        """Let everything happen."""
        for number, request in enumerate(self._requests):
            self._wake_before(request.arrival_s)
            self._arrive(number, request)
        self._wake_before(float("inf"))
        self._report()
        results = [result for result in self._results if result is not None]
        assert len(results) == len(self._requests), "every request ends"
        return Outcome(results, self._replicas)

    def _arrive(self, number: int, request: TraceRequest) -> None:
        index = self._router.choose(request, self._loads)
        replica, before = self._replicas[index], self._replicas[index].wakes_at
        self._loads[index] += 1
        wakes_at = replica.send(self._prompts.request(number, request))
        if wakes_at != before:
            heapq.heappush(self._events, (wakes_at, index))

    def _wake_before(self, moment: float) -> None:
        """Everything that happens before a moment."""
        events, replicas = self._events, self._replicas
        while events and events[0][0] < moment:
            wakes_at, index = heapq.heappop(events)
            replica = replicas[index]
            if replica.wakes_at != wakes_at:
                continue
            for finished in replica.wake():
                self._finish(finished, index)
            if replica.wakes_at is not None:
                heapq.heappush(events, (replica.wakes_at, index))

    def _finish(self, finished: Finished, index: int) -> None:
        number, stats = int(finished.request_id), finished.stats
        request = self._requests[number]
        self._loads[index] -= 1
        self._results[number] = Result(
            arrived_at=request.arrival_s,
            first_token_at=stats.first_token_at,
            ended_at=stats.last_token_at,
            num_output_tokens=stats.num_generation_tokens // request.n,
            num_preemptions=stats.num_preemptions,
            num_cached_tokens=finished.num_cached_tokens,
            replica=index,
        )
        self._num_finished += 1
        self._num_prompt_tokens += request.prompt_tokens
        self._num_output_tokens += stats.num_generation_tokens
        if self._num_finished % REPORT_EVERY == 0:
            self._report()

    def _report(self) -> None:
        self._on_progress(self._num_finished, self._num_prompt_tokens, self._num_output_tokens)
