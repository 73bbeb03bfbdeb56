"""`Flight`: steps that were handed to the executor and whose results have not been looked at yet.

One at a time, a step is computed in the thread that asks for its result. With more, a thread of the flight's own begins
them one after the other, and meanwhile the next is decided and the last one's tokens are handed out. Where a device
computes behind the host, a step begins before the result of the one before it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from quire.engine.quarantine import execute_guarded, submit_guarded
from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs

Read = Callable[[], ModelRunnerOutput]
"""Waits for the result of a step that has begun."""


class Flight:
    """The steps in flight, in order."""

    def __init__(self, max_steps: int) -> None:
        """`max_steps` at once."""
        self._max_steps = max_steps
        self._steps: deque[tuple[SchedulerOutputs, Future[Read] | partial[ModelRunnerOutput]]] = deque()
        self._thread = ThreadPoolExecutor(1, "quire-steps") if max_steps > 1 else None
        self._has_failed = False
        """What is still to be run is not: it builds on a step that was not computed."""
        self._failed: set[int] = set()
        """Sequences that a step has failed for; see `submit_guarded`."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        """Whether one more may be handed over."""
        return len(self._steps) < self._max_steps

    def submit(self, executor: Executor, plan: SchedulerOutputs) -> None:
        """Hand a step over."""
        if self._thread is None:
            self._steps.append((plan, partial(execute_guarded, executor, plan)))
        else:
            self._steps.append((plan, self._thread.submit(self._begin, executor, plan)))

    def land(self) -> tuple[SchedulerOutputs, ModelRunnerOutput]:
        """The first of the steps, and its result. Raises: what the executor raised beyond `submit_guarded`."""
        plan, step = self._steps[0]
        result = step.result()() if isinstance(step, Future) else step()
        self._steps.popleft()
        return plan, result

    def wait(self) -> None:
        """Come back when nothing is being computed."""
        for _, step in self._steps:
            if isinstance(step, Future) and step.exception() is None:
                with suppress(Exception):
                    step.result()()

    def abandon(self) -> None:
        """Forget all steps: those that have not begun never do, and what the others give is not looked at."""
        self._has_failed = True
        self.wait()
        self._steps.clear()
        self._failed.clear()
        self._has_failed = False

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.abandon()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _begin(self, executor: Executor, plan: SchedulerOutputs) -> Read:
        if self._has_failed:
            raise EngineDeadError("a step before this one was not computed")
        try:
            return submit_guarded(executor, plan, self._failed)
        except BaseException:
            self._has_failed = True
            raise
