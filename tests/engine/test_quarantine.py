"""A step that raises: the guilty request fails, the others do not notice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, RequestOutput, SamplingParams
from quire.engine.quarantine import execute_guarded
from quire.errors import EngineDeadError
from quire.executor.base import Executor
from quire.executor.inproc import InprocExecutor
from quire.messages.output import FinishReason
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.ops.contracts.operands import Largest
from quire.worker.graph_runner import GraphRunner
from quire.worker.input_builder import StepShape
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops
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


class FailsLate:
    """Two blocks of one number each: applies copies, writes, and raises when a guilty sequence was part of it."""

    def __init__(self) -> None:
        self.blocks = [7, 0]

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        for source, destination in plan.blocks_to_copy:
            self.blocks[destination] = self.blocks[source]
        if 2 in plan.seq_ids:
            self.blocks[0] = 99
            raise RuntimeError("guilty")
        return ModelRunnerOutput(token_ids=[[1] for _ in plan.seq_ids])

    def close(self) -> None: ...


def test_a_copy_is_not_repeated_when_another_sequence_has_written_to_its_source() -> None:
    """The source was given back by its last owner in the same step, and taken by a sequence that fails."""
    counts = {"num_computed_tokens": [0, 0], "num_scheduled_tokens": [1, 1], "num_draws": [1, 1]}
    plan = SchedulerOutputs(seq_ids=[1, 2], blocks_to_copy=[(0, 1)], **counts)
    executor = FailsLate()
    assert set(execute_guarded(executor, plan).errors) == {2}
    assert executor.blocks[1] == 7


class Closed:
    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        raise EngineDeadError("the executor is closed")

    def close(self) -> None: ...


def test_a_dead_executor_is_nobodys_fault() -> None:
    plan = SchedulerOutputs(seq_ids=[1], num_computed_tokens=[0], num_scheduled_tokens=[1], num_draws=[1])
    with pytest.raises(EngineDeadError):
        execute_guarded(Closed(), plan)


# -- with a real model ----------------------------------------------------------------------------------------

NAN_TOKEN = 300
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "block_size": 16, "num_gpu_blocks_override": 30}
PARAMS = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1, seed=6)
PROMPTS = [[7 * i + j for j in range(3 + 5 * i)] for i in range(6)]
SETTINGS = [PARAMS.clone(n=1 + i % 3, prompt_logprobs=1 if i % 2 else None) for i in range(6)]


class HalfWay(GraphRunner):
    """Computes and writes the cache, and then raises when it is armed."""

    is_armed = False

    def run(self, shape: StepShape) -> tuple[Tensor, Tensor | Largest | None]:
        outputs = super().run(shape)
        if self.is_armed:
            raise RuntimeError("guilty")
        return outputs


class Faulty:
    """Raises before or in the middle of the step, for the sequences that are told."""

    def __init__(self, inner: Executor) -> None:
        assert isinstance(inner, InprocExecutor)
        assert inner.worker is not None
        self.inner = inner
        self.runner = inner.worker.runner.graphs = HalfWay(
            inner.worker.ops, inner.worker.runner.model, inner.worker.runner.inputs
        )
        self.is_guilty: Callable[[int], bool] = lambda seq_id: False
        self.half_way = False
        self.num_raised = 0

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        guilty = any(self.is_guilty(seq_id) for seq_id in plan.seq_ids)
        self.num_raised += guilty
        if guilty and not self.half_way:
            raise RuntimeError("guilty")
        self.runner.is_armed = guilty
        return self.inner.execute(plan)

    def capture_graph(self) -> bool:
        return False

    def close(self) -> None:
        self.inner.close()


def run_all(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    scheduler = llm.engine.parts.core.scheduler
    scheduler.lives.check()
    assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks
    llm.reset_prefix_cache()
    return outputs


@pytest.fixture(scope="module")
def faulty(checkpoint: Checkpoint) -> Iterator[tuple[LLM, Faulty]]:
    with LLM(str(checkpoint("llama")), **OPTIONS) as llm:
        core = llm.engine.parts.core
        core.executor = executor = Faulty(core.executor)
        yield llm, executor


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Checkpoint) -> list[RequestOutput]:
    with LLM(str(checkpoint("llama")), **OPTIONS) as llm:
        return run_all(llm, PROMPTS, SETTINGS)


@pytest.mark.parametrize("half_way", [False, True])
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("after_steps", [0, 1, 5])
def test_the_others_get_the_same_bits_as_if_nothing_had_happened(
    faulty: tuple[LLM, Faulty], undisturbed: list[RequestOutput], half_way: bool, place: int, after_steps: int
) -> None:
    llm, executor = faulty
    guilty_prompt = [299, 298, 297]

    def is_guilty(seq_id: int) -> bool:
        sequences = llm.engine.parts.core.scheduler._scheduled
        seq = sequences[seq_id]
        return seq.group.request.prompt_token_ids == guilty_prompt and seq.num_output_tokens >= after_steps

    executor.is_guilty, executor.half_way, executor.num_raised = is_guilty, half_way, 0
    prompts = [*PROMPTS[:place], guilty_prompt, *PROMPTS[place:]]
    try:
        outputs = run_all(llm, prompts, [*SETTINGS[:place], PARAMS, *SETTINGS[place:]])
    finally:
        executor.is_guilty = lambda seq_id: False
    assert executor.num_raised > 2, "the step was run again in parts"
    bad = outputs.pop(place)
    assert bad.outputs[0].finish_reason == "error"
    assert len(bad.outputs[0].token_ids) == after_steps
    assert "RuntimeError" in bad.warnings[-1]
    for output, expected in zip(outputs, undisturbed, strict=True):
        assert output.outputs == expected.outputs
        assert output.prompt_logprobs == expected.prompt_logprobs


@pytest.fixture(scope="module")
def damaged(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one token whose embedding is not a number."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("damaged") / "model"
    shutil.copytree(checkpoint("llama"), directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][NAN_TOKEN] = torch.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("ops", available_ops())
def test_logits_that_are_not_finite_fail_their_request_and_no_other(
    damaged: Path, undisturbed: list[RequestOutput], ops: str
) -> None:
    with LLM(str(damaged), ops=ops, **OPTIONS) as llm:
        healthy = run_all(llm, PROMPTS, SETTINGS)
        bad_prompts = [[1, NAN_TOKEN, 2], [*range(50, 90), NAN_TOKEN, *range(30)]]
        bad_params = [PARAMS.clone(n=2), PARAMS.clone(prompt_logprobs=None)]
        outputs = run_all(llm, [*bad_prompts, *PROMPTS], [*bad_params, *SETTINGS])
        for bad in outputs[:2]:
            assert {completion.finish_reason for completion in bad.outputs} == {"error"}
            assert "not finite" in bad.warnings[-1]
            assert all(completion.token_ids == [] for completion in bad.outputs)
        for output, expected in zip(outputs[2:], healthy, strict=True):
            assert output.outputs == expected.outputs
            assert output.prompt_logprobs == expected.prompt_logprobs


@pytest.mark.parametrize("ops", available_ops())
def test_in_a_step_of_greedy_rows_logits_that_are_not_finite_fail_their_request_alone(damaged: Path, ops: str) -> None:
    """The largest logits are all that such a step computes."""
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(str(damaged), ops=ops, **OPTIONS) as llm:
        reported = run_all(llm, PROMPTS, [greedy.clone(logprobs=0)] * len(PROMPTS))
        bad, *good = run_all(llm, [[1, NAN_TOKEN, 2], *PROMPTS], [greedy] * (1 + len(PROMPTS)))
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].token_ids == []
    assert "the model's logits for token 3 are not finite (the largest is nan)" in bad.warnings[-1]
    for output, expected in zip(good, reported, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("ops", available_ops())
def test_what_a_failed_request_left_in_memory_is_never_seen_again(damaged: Path, ops: str) -> None:
    options = {**OPTIONS, "num_gpu_blocks_override": 6}
    with LLM(str(damaged), ops=ops, **options) as llm:
        fresh = run_all(llm, PROMPTS, SETTINGS)
        for _ in range(3):
            (bad,) = run_all(llm, [[NAN_TOKEN] * 95], [PARAMS.clone(prompt_logprobs=None)])  # fills every block
            assert bad.outputs[0].finish_reason == "error"
            for output, expected in zip(run_all(llm, PROMPTS, SETTINGS), fresh, strict=True):
                assert output.outputs == expected.outputs
                assert output.prompt_logprobs == expected.prompt_logprobs


def test_a_token_that_breaks_the_model_in_mid_answer_ends_that_answer_alone(damaged: Path) -> None:
    with LLM(str(damaged), **OPTIONS) as llm:
        forced = SamplingParams(allowed_token_ids=[65, NAN_TOKEN], max_tokens=30, n=4, seed=0)
        bad, good = llm.generate([[1, 2], PROMPTS[2]], [forced, SETTINGS[2]])
        assert {completion.finish_reason for completion in bad.outputs} == {"error"}
        for completion in bad.outputs:
            assert completion.token_ids[-1] == NAN_TOKEN
            assert set(completion.token_ids[:-1]) <= {65}
        assert len({len(completion.token_ids) for completion in bad.outputs}) > 1, "branches fail one by one"
        assert good.outputs == run_all(llm, [PROMPTS[2]], [SETTINGS[2]])[0].outputs
