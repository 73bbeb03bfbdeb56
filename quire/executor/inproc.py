"""One worker in this process."""

from __future__ import annotations

from quire.config.engine import QuireConfig
from quire.errors import EngineDeadError
from quire.executor.base import Progress
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.ledger import Ledger
from quire.worker.worker import Worker


class InprocExecutor:
    """A call is all it takes."""

    def __init__(self, config: QuireConfig, ledger: Ledger, progress: Progress | None = None) -> None:
        self.worker: Worker | None = Worker(config, ledger, progress)

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Run one step."""
        if self.worker is None:
            raise EngineDeadError("the engine was closed; make another one")
        return self.worker.execute(plan)

    def close(self) -> None:
        """Drop model and cache."""
        self.worker = None
