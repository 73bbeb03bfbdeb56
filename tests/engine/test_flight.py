"""Steps that are handed over before the ones before them are looked at: in order, none computed after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.flight import Flight
from quire.errors import EngineDeadError
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops

WAIT_S = 30.0


class Device:
    """Computes a step when it may, and says which."""

    def __init__(self) -> None:
        self.may_go = threading.Semaphore(0)
        self.steps: list[int] = []
        self.error: BaseException | None = None

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        assert self.may_go.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error
        self.steps += plan.seq_ids
        return ModelRunnerOutput(token_ids=[[seq_id] for seq_id in plan.seq_ids])

    def submit(self, plan: SchedulerOutputs) -> Callable[[], ModelRunnerOutput]:
        result = self.execute(plan)
        return lambda: result


def step(*seq_ids: int) -> SchedulerOutputs:
    """Of sequences with a token each."""
    ones = [1] * len(seq_ids)
    return SchedulerOutputs(
        seq_ids=[*seq_ids], num_computed_tokens=[0] * len(ones), num_scheduled_tokens=ones, num_draws=ones
    )


def test_one_at_a_time_is_computed_when_it_lands() -> None:
    flight, device = Flight(1), Device()
    device.may_go.release()
    flight.submit(device, step(1))  # type: ignore[arg-type]
    assert not device.steps
    assert not flight.has_room
    assert flight.land()[1].token_ids == [[1]]
    assert not len(flight)
    flight.close()


def test_several_are_computed_in_their_order_before_anybody_asks() -> None:
    flight, device = Flight(3), Device()
    for number in range(3):
        assert flight.has_room
        flight.submit(device, step(number))  # type: ignore[arg-type]
        device.may_go.release()
    assert not flight.has_room
    flight.wait()
    assert device.steps == [0, 1, 2]
    assert [flight.land()[1].token_ids for _ in range(3)] == [[[0]], [[1]], [[2]]]
    flight.close()


@pytest.mark.parametrize("error", [EngineDeadError("the worker is gone"), KeyboardInterrupt()])
def test_nothing_is_computed_after_a_step_that_was_not(error: BaseException) -> None:
    flight, device = Flight(2), Device()
    device.error = error
    for number in (1, 2):
        flight.submit(device, step(number))  # type: ignore[arg-type]
    device.may_go.release()
    with pytest.raises(type(error)):
        flight.land()
    flight.abandon()
    assert not len(flight)
    device.error = None
    flight.submit(device, step(3))  # type: ignore[arg-type]
    device.may_go.release()
    assert flight.land()[1].token_ids == [[3]]
    assert device.steps == [3]
    flight.close()


class Refuses(Device):
    """Raises before it has heard of a step that some sequence is part of, at first."""

    def __init__(self, guilty: int) -> None:
        super().__init__()
        self.guilty: int | None = guilty
        self.removed: list[int] = []

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        if self.guilty in plan.seq_ids:
            raise ValueError("guilty")
        self.removed += plan.removed_seq_ids
        self.may_go.release()
        return super().execute(plan)


def test_a_sequence_that_a_step_has_failed_for_is_left_out_of_those_decided_before_that_was_known() -> None:
    """It would go on from blocks and tokens that nobody has, and write where others are."""
    flight, device = Flight(4), Refuses(guilty=2)
    flight.submit(device, both := step(1, 2, 3))  # type: ignore[arg-type]
    flight.wait()
    device.guilty = None
    flight.submit(device, both)  # type: ignore[arg-type]
    flight.submit(device, step(2))  # type: ignore[arg-type]
    flight.submit(device, replace(step(3, 2), removed_seq_ids=[2]))  # type: ignore[arg-type]
    results = [flight.land()[1] for _ in range(4)]
    assert [set(result.errors) for result in results] == [{2}, {2}, {2}, set()]
    assert [result.token_ids for result in results] == [[[1], [], [3]], [[1], [], [3]], [[]], [[3], [2]]]
    assert device.steps == [1, 3, 1, 3, 3, 2]
    assert device.removed == [2]
    flight.close()


def run(path: Path, ops: str, *, is_async: bool) -> list[RequestOutput]:
    with LLM(str(path), ops=ops, async_scheduling=is_async, num_threads=1, max_num_seqs=3) as llm:
        assert llm.engine.config.scheduler_config.max_steps_in_flight == (2 if is_async else 1)
        prompts = [{"prompt_token_ids": [3 + index] * (1 + 7 * index)} for index in range(5)]
        params = [
            SamplingParams(max_tokens=12, temperature=0.9, seed=index, logprobs=2, n=1 + index % 2, min_p=0.01)
            for index in range(5)
        ]
        params[3] = SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3, structured_outputs=None)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in again]
        return outputs


@pytest.mark.parametrize("ops", available_ops())
def test_an_engine_says_the_same_with_the_next_step_decided_ahead(checkpoint: Checkpoint, ops: str) -> None:
    alone, ahead = (run(checkpoint("llama"), ops, is_async=is_async) for is_async in (False, True))
    for one, other in zip(alone, ahead, strict=True):
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == its.token_ids
            assert mine.logprobs == its.logprobs
