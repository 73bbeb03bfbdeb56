"""A core process that some prompts end: what runs is quire's own, but for an executor that looks at the prompts."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future

from quire.engine.engine_core import EngineCore
from quire.engine.process import core_process
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.structured.grammar import Grammar, Vocabulary

CRASH, HANG, RAISE = 1001, 1003, 1005
"""The first token of a prompt that ends the process by a fault of its own, makes its step hang, or makes it raise."""


class PoisonedExecutor:
    """Acts when a sequence with such a prompt has its third output token computed."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.prompts: dict[str, list[int]] = {}
        self.request_of: dict[int, str] = {}

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        self.prompts |= {request.request_id: request.prompt_token_ids for request in plan.new_requests}
        self.request_of |= {new.seq_id: new.request_id for new in plan.new_sequences}
        for seq_id, computed, count in zip(
            plan.seq_ids, plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True
        ):
            prompt = self.prompts[self.request_of[seq_id]]
            if computed + count > len(prompt) + 2:
                _act(prompt[0])
        return self.inner.execute(plan)

    def use_vocabulary(self, vocabulary: Vocabulary) -> None:
        self.inner.use_vocabulary(vocabulary)

    def prepare_grammar(self, grammar: Grammar) -> Future[None]:
        return self.inner.prepare_grammar(grammar)

    def capture_graph(self) -> bool:
        return False

    def close(self) -> None:
        self.inner.close()


def _act(token_id: int) -> None:
    if token_id == CRASH:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif token_id == HANG:
        time.sleep(1000)
    elif token_id == RAISE:
        raise RuntimeError("poison")


class PoisonedProc(core_process.EngineCoreProc):
    """EngineCoreProc over such an executor."""

    def __init__(self, core: EngineCore, control: core_process.Control) -> None:
        core.executor = PoisonedExecutor(core.executor)
        super().__init__(core, control)


if __name__ == "__main__":
    core_process.main(PoisonedProc)
