"""Priorities through every way in: who is served first, what is refused, and that no bit depends on them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from quire.errors import InvalidParameter
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs

LIMITS: dict[str, Any] = {"max_model_len": 256, "block_size": 16, "num_gpu_blocks_override": 64}
BY_PRIORITY: dict[str, Any] = {**LIMITS, "scheduling_policy": "priority"}
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
PROMPTS = ["import os", "The KV cache", "def f(x):", "A page of"]
NOT_INTEGERS = ["1", 1.5, True, [1], None]
NOT_ALLOWED = [2**31, -(2**31) - 1, 10**30]


@pytest.fixture(scope="module")
def one_seat() -> Iterator[LLM]:
    """An engine that runs one sequence at a time, by priority."""
    with LLM(**BY_PRIORITY, max_num_seqs=1) as llm:
        yield llm


def order(outputs: list[RequestOutput]) -> list[int]:
    """The indices of outputs in the order in which they got their first tokens."""
    times = [output.metrics.first_token_at for output in outputs if output.metrics is not None]
    return sorted(range(len(outputs)), key=times.__getitem__)


def told(outputs: list[RequestOutput]) -> list[tuple[list[int], Any]]:
    """Tokens and logprobs, bit for bit."""
    return [
        (output.outputs[0].token_ids, [sorted((k, v.logprob) for k, v in p.items()) for p in c.logprobs or ()])
        for output in outputs
        for c in output.outputs
    ]


def test_prompts_with_lower_priorities_come_first_and_have_the_same_tokens(one_seat: LLM) -> None:
    plain = one_seat.generate(PROMPTS, PARAMS)
    assert order(plain) == [0, 1, 2, 3]
    sorted_ = one_seat.generate(PROMPTS, PARAMS, priority=[2, np.int64(-5), 2**31 - 1, -(2**31)])  # type: ignore[list-item]
    assert order(sorted_) == [3, 1, 0, 2]
    assert told(plain) == told(sorted_)


def test_conversations_have_priorities_too(one_seat: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in PROMPTS]
    outputs = one_seat.chat(conversations, PARAMS, priority=(3, 2, 1, 0))
    assert order(outputs) == [3, 2, 1, 0]


@pytest.mark.parametrize("given", [[1], [1, 2, 3, 4, 5], 7, "1234", {0: 1}])
def test_there_is_one_priority_for_each_prompt(one_seat: LLM, given: Any) -> None:
    with pytest.raises(InvalidParameter, match="priority must be a list with one integer for each of 4 prompts"):
        one_seat.generate(PROMPTS, PARAMS, priority=given)


@pytest.mark.parametrize("value", [*NOT_INTEGERS, *NOT_ALLOWED])
def test_what_is_no_priority_is_refused_and_nothing_runs(one_seat: LLM, value: Any) -> None:
    message = r"^prompt 3: priority must be (an integer|in \[-2147483648, 2147483647\]), got "
    with pytest.raises(InvalidParameter, match=message) as caught:
        one_seat.generate(PROMPTS, PARAMS, priority=[0, 0, 0, value])
    assert caught.value.parameter == "priority"
    assert not one_seat.engine.has_unfinished_requests()
    with pytest.raises(InvalidParameter, match="priority must be"):
        one_seat.engine.add_request("1", "a", PARAMS, priority=value)


def test_a_priority_that_would_have_no_effect_is_refused(tiny_llm: LLM) -> None:
    message = re.escape("priority=1 has no effect: this engine serves requests in order of arrival. Start it with "
                        "--scheduling-policy priority")  # fmt: skip
    with pytest.raises(InvalidParameter, match=message):
        tiny_llm.generate("a", PARAMS, priority=[1])
    with pytest.raises(InvalidParameter, match=message):
        tiny_llm.chat([{"role": "user", "content": "hi"}], PARAMS, priority=[1])
    with pytest.raises(InvalidParameter, match=message):
        tiny_llm.engine.add_request("1", "a", PARAMS, priority=1)
    assert not tiny_llm.engine.has_unfinished_requests()
    assert len(tiny_llm.generate(["a", "b"], {"max_tokens": 1}, priority=[0, 0])) == 2


def test_the_async_engine_takes_and_refuses_priorities() -> None:
    async def ask(engine: AsyncLLMEngine, value: Any) -> list[int]:
        outputs = [output async for output in engine.generate([5, 6], PARAMS, priority=value)]
        return outputs[-1].outputs[0].token_ids

    async def check() -> None:
        with AsyncLLMEngine.from_engine_args(EngineArgs(**BY_PRIORITY)) as engine:
            assert await ask(engine, -7) == await ask(engine, 0)
            for value in (*NOT_INTEGERS, *NOT_ALLOWED):
                with pytest.raises(InvalidParameter, match="priority must be"):
                    await ask(engine, value)
            assert engine.num_unfinished == 0

    asyncio.run(check())


class Scores:
    """An executor that counts the prompt logprobs of each step of another."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_scored = 0

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        result = self.inner.execute(plan)
        self.num_scored += sum(map(len, result.prompt_logprobs.values()))
        return result

    def capture_graph(self) -> bool:
        return False

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_preempted_prompt_has_its_logprobs_once_and_with_the_same_bits(chunk: int) -> None:
    prompt = [3 + i * 7 % 90 for i in range(100)]
    params = PARAMS.clone(prompt_logprobs=3)
    with LLM(**BY_PRIORITY, max_num_seqs=1, long_prefill_token_threshold=chunk) as llm:
        (alone,) = llm.generate([prompt], params)
        core = llm.engine.parts.core
        counting = core.executor = Scores(core.executor)  # type: ignore[assignment]
        preempted = run_with_interruptions(llm.engine, prompt, params)
    assert core.scheduler.num_preemptions >= 2
    assert counting.num_scored == 99
    assert alone.prompt_logprobs is not None
    assert len(alone.prompt_logprobs) == 100
    assert preempted.prompt_logprobs == alone.prompt_logprobs
    assert told([preempted]) == told([alone])


def run_with_interruptions(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """The output of a request to which three others of a lower priority come, each when it has got on a little."""
    engine.add_request("low", prompt, params, priority=5)
    for i in range(3):
        engine.step()
        engine.add_request(f"high{i}", [9, 9, i], {"max_tokens": 2, "ignore_eos": True}, priority=0)
        while engine.get_num_unfinished_requests() > 1:
            engine.step()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                return output
    raise AssertionError("it did not end")
