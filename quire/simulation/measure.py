"""Measure the steps of a real core: what was in each, and when the next one began."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from quire.executor.base import Executor
from quire.messages.kv_tiers import TierReport
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.simulation.cost_model import Batches, StepShape, shape_of
from quire.simulation.fit import Step
from quire.structured.grammar import Grammar, Vocabulary


class MeasuringExecutor:
    """Passes steps on to another executor. A step lasts until the next one begins, so deciding and learning count.

    After idling it begins as a request arrives, so taking it in counts, too.
    """

    def __init__(
        self, inner: Executor, clock: Callable[[], float] = time.perf_counter, batches: Batches | None = None
    ) -> None:
        """`batches`: of all who measure the same executor; by default nobody else does."""
        self.steps: list[Step] = []
        self._inner = inner
        self._clock = clock
        self._batches = batches or Batches()
        self._open: tuple[StepShape, float] | None = None
        self._arrived_at: float | None = None

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """See `Executor`."""
        now = self._clock()
        self._close(now)
        self._open = shape_of(plan, self._batches), now if self._arrived_at is None else self._arrived_at
        self._arrived_at = None
        return self._inner.execute(plan)

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        """See `Executor`. A step has ended when this comes back, so that its time is its own."""
        result = self.execute(plan)
        return lambda: result

    def pause(self) -> None:
        """No step follows the last one directly, so that its end is not known."""
        self._open = None

    def end(self) -> None:
        """There is nothing to do after the last step, which ends now."""
        self._close(self._clock())

    def _close(self, now: float) -> None:
        if self._open is not None:
            self.steps.append(Step(self._open[0], now - self._open[1]))
        self._open = None

    def arrive(self) -> None:
        """A request arrives while there is nothing to do: the step that it begins lasts from now."""
        self.pause()
        self._batches.idle()
        self._arrived_at = self._clock()

    def determine_num_available_blocks(self) -> int:
        """See `Executor`."""
        return self._inner.determine_num_available_blocks()

    def open_kv_tiers(self, engine: bytes) -> TierReport:
        """See `Executor`."""
        return self._inner.open_kv_tiers(engine)

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """See `Executor`."""
        self._inner.use_vocabulary(vocabulary)

    def prepare_grammar(self, grammar: Grammar) -> Future[None]:
        """See `Executor`."""
        return self._inner.prepare_grammar(grammar)

    def clear_kv_tiers(self) -> None:
        """See `Executor`."""
        self._inner.clear_kv_tiers()

    def capture_graph(self) -> bool:
        """See `Executor`."""
        return self._inner.capture_graph()

    def close(self) -> None:
        """See `Executor`."""
        self._inner.close()
