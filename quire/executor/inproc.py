"""One worker in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from quire.config.engine import QuireConfig
from quire.errors import EngineDeadError
from quire.executor.base import Progress
from quire.executor.profile import compare_profile
from quire.messages.kv_tiers import TierReport
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.ledger import Ledger
from quire.structured.grammar import Grammar, Vocabulary
from quire.utils.process import memory_status
from quire.worker.worker import Worker


class InprocExecutor:
    """A call is all it takes."""

    def __init__(self, config: QuireConfig, ledger: Ledger, progress: Progress | None = None) -> None:
        self._config = config
        self._ledger = ledger
        self._process_bytes = memory_status().get("VmRSS", 0)
        self.worker: Worker | None = Worker(config, ledger, progress)

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Run one step."""
        return self._running().execute(plan)

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        """See `Executor`."""
        return self._running().submit(plan)

    def determine_num_available_blocks(self) -> int:
        """See `Executor`. What the process held before is its own; weights are what it took while they were read."""
        measured = {"weights": self._ledger.memory.get("weights", 0), "process": self._process_bytes}
        if not self._config.device_config.capabilities.host_memory:  # else the weights are not the process's
            compare_profile(self._config.memory_plan, measured)
        return self._config.cache_config.num_blocks

    def open_kv_tiers(self, engine: bytes) -> TierReport:
        """See `Executor`."""
        return self._running().open_kv_tiers(engine)

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """See `Executor`."""
        self._running().grammars.use(vocabulary)

    def prepare_grammar(self, grammar: Grammar) -> Future[None]:
        """See `Executor`."""
        return self._running().grammars.prepare(grammar)

    def clear_kv_tiers(self) -> None:
        """See `Executor`."""
        self._running().clear_kv_tiers()

    def capture_graph(self) -> bool:
        """See `Executor`."""
        return self._running().capture_graph()

    def close(self) -> None:
        """Drop model and cache."""
        if self.worker is not None:
            self.worker.close()
        self.worker = None

    def _running(self) -> Worker:
        if self.worker is None:
            raise EngineDeadError("the engine was closed; make another one")
        return self.worker
