"""A step that raises: the guilty request fails, the others do not notice."""

from __future__ import annotations

import pytest

from quire.engine.quarantine import execute_guarded
from quire.errors import EngineDeadError
from quire.messages.output import FinishReason
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from tests.fakes import FakeCore, expected_tokens


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_copies_of_a_fork_are_not_repeated_over_what_the_halves_have_written(n: int, num_before: int) -> None:
    core = FakeCore(num_blocks=64)
    for i in range(num_before):
        core.submit(f"before{i}", [i, 7], max_tokens=8)
    core.submit("forked", [1, 2, 3, 4, 5], max_tokens=6, params={"n": n})
    core.step()
    core.submit("poison", [9], max_tokens=3)
    core.executor.fail_on = lambda request_id: request_id == "poison"
    core.step()
    core.run()
    assert core.finished["poison", 0].finish_reason is FinishReason.ERROR
    for branch in range(n):
        assert core.finished["forked", branch].finish_reason is FinishReason.LENGTH
        assert core.tokens["forked", branch] == expected_tokens([1, 2, 3, 4, 5], branch, 6)


class Closed:
    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        raise EngineDeadError("the executor is closed")

    def close(self) -> None: ...


def test_a_dead_executor_is_nobodys_fault() -> None:
    plan = SchedulerOutputs(seq_ids=[1], num_computed_tokens=[0], num_scheduled_tokens=[1], samples=[True])
    with pytest.raises(EngineDeadError):
        execute_guarded(Closed(), plan)
