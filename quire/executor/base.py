"""`Executor`: how a step reaches the workers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, cast

from quire.config.engine import QuireConfig
from quire.messages.kv_tiers import TierReport
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.observability.ledger import Ledger
from quire.structured.grammar import Grammar, Vocabulary
from quire.utils.lazy import LazyTable

Progress = Callable[[int, int], None]


class Executor(Protocol):
    """Runs steps, wherever the workers are."""

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """Run one step on all workers. An exception means that no token was drawn and the step may be run again."""

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        """Begin one step; what this gives waits for the result. The next step may begin before.

        An exception means the same as one of `execute`. Reading the result raises only where the workers are lost.
        """

    def determine_num_available_blocks(self) -> int:
        """KV blocks of the pool, as planned; logs where what was loaded differs from the plan by more than 3 %."""

    def open_kv_tiers(self, engine: bytes) -> TierReport:
        """Get the tiers below the KV cache ready; called once, if the configuration has any, before the first step.

        `engine` is the digest of the engine's identity. Raises: ConfigError when the file cannot be used.
        """

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of the model's tokens, before the first grammar. Taken once: others would be the same."""

    def prepare_grammar(self, grammar: Grammar) -> Future[None]:
        """Compile a grammar beside the steps; done when requests that have it can run."""

    def clear_kv_tiers(self) -> None:
        """Forget all pages in the tiers, between two steps."""

    def capture_graph(self) -> bool:
        """Capture the next graph that steps can run from, if one is missing; only while nothing is computed.

        Gives whether more are missing. Until all are there, and where they cannot be, steps run op by op.
        """

    def close(self) -> None:
        """Let the workers go; harmless when called again."""


EXECUTORS = LazyTable("executor", {"inproc": "quire.executor.inproc:InprocExecutor"})


def create_executor(config: QuireConfig, ledger: Ledger, progress: Progress | None = None) -> Executor:
    """The executor that the configuration names, its model loaded."""
    cls = cast(Callable[..., Executor], EXECUTORS.load(config.parallel_config.executor))
    return cls(config, ledger, progress)
