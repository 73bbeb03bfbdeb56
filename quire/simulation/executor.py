"""`SimExecutor`: an executor without a model. A step takes the time that a cost model says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from quire.errors import ConfigError
from quire.messages.kv_tiers import TierReport
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.simulation.clock import VirtualClock
from quire.simulation.cost_model import Batches, CostModel, StepShape, shape_of
from quire.structured.grammar import Grammar, Vocabulary

OnStep = Callable[[StepShape, float], None]
"""Hears what each step computes and how long it takes, while its sequences hold their blocks."""


class SimExecutor:
    """Runs steps by letting the virtual time pass that they would take."""

    def __init__(self, clock: VirtualClock, cost: CostModel, num_blocks: int, on_step: OnStep) -> None:
        self._clock = clock
        self._cost = cost
        self._num_blocks = num_blocks
        self._on_step = on_step
        self.batches = Batches()

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        """See `Executor`. Each sequence draws one token over and over, which no other sequence draws."""
        number, began_at = self.batches.num_steps, self._clock.now
        shape = shape_of(plan, self.batches)
        self._clock.now += self._cost.step_s(shape) * self._cost.factor(number, has_prompt=shape.num_pairs > 0)
        self._on_step(shape, self._clock.now - began_at)
        result = ModelRunnerOutput()
        for seq_id, num_draws in zip(plan.seq_ids, plan.num_draws, strict=True):
            result.token_ids.append([token_of(seq_id)] if num_draws == 1 else [])
            if num_draws > 1:
                result.forks[seq_id] = [token_of(seq_id) + branch for branch in range(num_draws)]
        return result

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        """See `Executor`. Time passes when a step begins."""
        result = self.execute(plan)
        return lambda: result

    def determine_num_available_blocks(self) -> int:
        """See `Executor`."""
        return self._num_blocks

    def open_kv_tiers(self, engine: bytes) -> TierReport:
        """See `Executor`.

        Raises: ConfigError always: what moving pages costs is not part of the cost model.
        """
        raise ConfigError("the simulator has no tiers below the KV cache; leave out kv_ram and kv_disk")

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        """See `Executor`: nothing is read here."""

    def prepare_grammar(self, grammar: Grammar) -> Future[None]:
        """See `Executor`.

        Raises: ConfigError always: simulated requests have no grammars.
        """
        raise ConfigError("the simulator draws no tokens that a grammar could constrain")

    def clear_kv_tiers(self) -> None:
        """See `Executor`: there are none."""

    def capture_graph(self) -> bool:
        """See `Executor`: there are none."""
        return False

    def close(self) -> None:
        """Nothing is held."""


def token_of(seq_id: int) -> int:
    """What a sequence says."""
    return seq_id << 32
