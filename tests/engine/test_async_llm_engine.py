"""`AsyncLLMEngine`: many readers on one loop, a core in its own thread, and no way to leave anything behind."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import pytest

from quire import SamplingParams
from quire.config.flags.args import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.startup import EngineParts, start
from quire.errors import EngineDeadError, InvalidParameter, QuireError
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind
from tests.conftest import Checkpoint
from tests.expert_checkpoints import VOCAB_SIZE

LONG = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0, logprobs=1)
SHORT = LONG.clone(max_tokens=6)
DELTA = RequestOutputKind.DELTA
POISON = [66, 66]
"""A prompt with which the `Gate` raises."""
TIMEOUT = 60
"""Seconds after which a test that waits for what never comes is ended."""


class Gate:
    """An executor through which steps pass while it is open, and which can be told to break."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.is_open = threading.Event()
        self.is_open.set()
        self.reached = threading.Event()
        """Set when a step has come to the closed gate."""
        self.error: Exception | None = None
        self.forgets_results = False
        self.poisoned: set[str] = set()

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        if not self.is_open.is_set():
            self.reached.set()
            assert self.is_open.wait(TIMEOUT)
        if self.error is not None:
            raise self.error
        self.poisoned |= {new.request_id for new in plan.new_requests if new.prompt_token_ids == POISON}
        if any(new.request_id in self.poisoned for new in plan.new_sequences):
            raise RuntimeError("poison")
        result = self.inner.execute(plan)
        if self.forgets_results:
            result.token_ids.clear()  # the scheduler cannot take this in
        return result

    def capture_graph(self) -> bool:
        return False

    def close(self) -> None:
        self.inner.close()


class Harness:
    """An engine whose steps and whose tokenising can be held."""

    def __init__(self, directory: str, **options: Any) -> None:
        self.tokenising = threading.Event()
        """Set when a request's processing has come to its end, where it waits while `may_finish` is clear."""
        self.may_finish = threading.Event()
        self.may_finish.set()
        defaults: dict[str, Any] = {"max_model_len": 128, "block_size": 16, "dtype": "float32"}
        self.parts: EngineParts = start(EngineArgs(model=directory, **{**defaults, **options}), self._clock)
        self.gate = Gate(self.parts.core.executor)
        self.parts.core.executor = self.gate
        self.engine = AsyncLLMEngine(self.parts)

    def _clock(self) -> float:
        if threading.current_thread().name == "quire-work":  # a request is being processed
            self.tokenising.set()
            assert self.may_finish.wait(TIMEOUT)
        return time.monotonic()

    async def settled(self) -> None:
        """Return when the core has carried out everything that was asked before."""
        await self.collect([3, 1, 4], SHORT.clone(max_tokens=1))

    async def collect(self, prompt: Any, params: SamplingParams, request_id: str | None = None) -> list[RequestOutput]:
        return [output async for output in self.engine.generate(prompt, params, request_id)]

    async def final(self, prompt: Any, params: SamplingParams) -> list[CompletionOutput]:
        return (await self.collect(prompt, params))[-1].outputs

    def assert_idle(self) -> None:
        scheduler = self.parts.core.scheduler
        scheduler.lives.check()
        assert not scheduler.lives.groups
        assert scheduler.blocks.pool.num_free == scheduler.blocks.pool.num_blocks
        assert len(self.parts.output_processor) == 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """The core stands still in the middle of a step."""
        self.gate.reached.clear()
        self.gate.is_open.clear()
        try:
            yield
        finally:
            self.gate.is_open.set()


def run(main: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main, TIMEOUT)

    asyncio.run(limited())


async def until_reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, TIMEOUT)


@pytest.fixture(scope="module")
def shared(checkpoint: Checkpoint) -> Iterator[Harness]:
    harness = Harness(str(checkpoint("llama")))
    with harness.engine:
        yield harness


@pytest.fixture
def own(checkpoint: Checkpoint) -> Iterator[Harness]:
    """An engine for one test, which may break it."""
    harness = Harness(str(checkpoint("llama")), max_num_seqs=8)
    with harness.engine:
        yield harness
    harness.gate.is_open.set()


# -- readers --------------------------------------------------------------------------------------------------


def test_many_readers_at_once_get_what_each_gets_alone(shared: Harness) -> None:
    async def main() -> None:
        prompts = [[i % VOCAB_SIZE, 7 * i % VOCAB_SIZE, 5] for i in range(40)]
        params = [
            SHORT.clone(seed=i, temperature=0.5 * (i % 2), max_tokens=5 + i, output_kind=RequestOutputKind(i % 3))
            for i in range(40)
        ]
        together = await asyncio.gather(*(shared.collect(p, q) for p, q in zip(prompts, params, strict=True)))
        for prompt, given, outputs in zip(prompts, params, together, strict=True):
            alone = await shared.final(prompt, given.clone(output_kind=RequestOutputKind.FINAL_ONLY))
            assert outputs[-1].finished
            if given.output_kind is DELTA:
                whole = outputs[0]
                for output in outputs[1:]:
                    whole = whole.merged(output)
                assert whole.outputs == alone
            else:
                assert outputs[-1].outputs == alone
        await shared.settled()
        shared.assert_idle()

    run(main())


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_slow_reader_gets_fewer_outputs_that_still_add_up(shared: Harness, kind: RequestOutputKind) -> None:
    async def main() -> None:
        params = LONG.clone(max_tokens=30, n=2, temperature=1.0, seed=4, output_kind=kind, prompt_logprobs=1)
        prompt = [1, 2, 3, 4]
        seen: list[RequestOutput] = []
        async with aclosing(shared.engine.generate(prompt, params)) as stream:  # type: ignore[type-var]
            async for output in stream:
                seen.append(output)
                await shared.final([9], LONG.clone(max_tokens=20))  # twenty steps pass before the next look
        assert len(seen) <= 3
        expected = (await shared.collect(prompt, params.clone(output_kind=RequestOutputKind.FINAL_ONLY)))[0]
        whole = seen[0]
        for output in seen[1:]:
            whole = whole.merged(output) if kind is DELTA else output
        assert whole.outputs == expected.outputs
        assert whole.prompt_logprobs == expected.prompt_logprobs
        assert whole.finished

    run(main())


def test_every_output_carries_the_id_that_the_caller_gave(shared: Harness) -> None:
    async def main() -> None:
        assert {output.request_id for output in await shared.collect([1], SHORT, "mine")} == {"mine"}

    run(main())


def test_the_engine_serves_one_loop_after_another(shared: Harness) -> None:
    unfinished: list[AsyncIterator[RequestOutput]] = []

    async def leave() -> None:
        stream = shared.engine.generate([1, 2], LONG)
        unfinished.append(stream)  # kept alive: the closing loop ends it, not the garbage collector
        await anext(stream)

    async def main() -> None:
        await shared.settled()
        shared.assert_idle()

    run(leave())
    run(main())
    assert not shared.engine.errored


@pytest.mark.skipif(sys.platform != "linux", reason="the scheduler is Linux's")
@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) < 0, reason="a thread with a negative niceness stays as it is")
def test_the_thread_of_the_loop_wakes_promptly_and_that_of_the_core_does_not(shared: Harness) -> None:
    def is_prompt(name: str) -> bool:
        # engines of other tests have such threads, too
        own = [thread.native_id for thread in threading.enumerate() if thread.name == name]
        policies = [os.sched_getscheduler(native_id) for native_id in own if native_id is not None]
        assert policies
        return any(policy & os.SCHED_RESET_ON_FORK for policy in policies)

    async def main() -> None:
        await shared.collect([1], SHORT, "mine")

    run(main())
    assert is_prompt(threading.current_thread().name)
    assert not is_prompt("quire-core")


# -- leaving and aborting -------------------------------------------------------------------------------------


def test_leaving_the_loop_frees_the_blocks(shared: Harness) -> None:
    async def main() -> None:
        async with aclosing(shared.engine.generate(list(range(40)), LONG)) as stream:  # type: ignore[type-var]
            async for _ in stream:
                break
        await shared.settled()
        shared.assert_idle()

    run(main())


def test_cancelling_the_task_that_reads_frees_the_blocks(shared: Harness) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def read(index: int) -> None:
            async for _ in shared.engine.generate([index] * 20, LONG):
                started.set()

        tasks = [asyncio.create_task(read(index)) for index in range(12)]
        await started.wait()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await shared.settled()
        shared.assert_idle()

    run(main())


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_abort_ends_the_reader_with_what_there_is(shared: Harness, kind: RequestOutputKind) -> None:
    async def main() -> None:
        with shared.held():
            task = asyncio.create_task(shared.collect([8, 8], LONG.clone(output_kind=kind), "a"))
            await until_reached(shared.gate.reached)
            await shared.engine.abort("a")
            outputs = await task
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await shared.settled()
        shared.assert_idle()

    run(main())


def test_abort_while_the_prompt_is_tokenised_is_not_lost(shared: Harness) -> None:
    async def main() -> None:
        shared.tokenising.clear()
        shared.may_finish.clear()
        task = asyncio.create_task(shared.collect([8, 8], LONG, "a"))
        try:
            await asyncio.get_running_loop().run_in_executor(None, shared.tokenising.wait, TIMEOUT)
            await shared.engine.abort("a")
        finally:
            shared.may_finish.set()
        (output,) = await task
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        await shared.settled()
        shared.assert_idle()

    run(main())


def test_abort_of_an_unknown_or_finished_request_does_nothing(shared: Harness) -> None:
    async def main() -> None:
        await shared.collect([1], SHORT, "a")
        await shared.engine.abort("a")
        await shared.engine.abort("nobody")
        assert len(await shared.final([1], SHORT)) == 1

    run(main())


def test_a_generator_that_is_never_iterated_leaves_nothing(shared: Harness) -> None:
    async def main() -> None:
        unused = [shared.engine.generate([1], LONG, "a") for _ in range(3)]
        shared.assert_idle()
        assert (await shared.collect([1], SHORT, "a"))[-1].finished
        del unused

    run(main())


@pytest.mark.parametrize(
    "prompt",
    ["", [VOCAB_SIZE], [1] * 200, {"promt": "a"}, {"prompt_token_ids": [VOCAB_SIZE]}, {"prompt_token_ids": [1] * 2000}],
)
def test_a_refused_request_leaves_nothing_and_its_id_is_free(shared: Harness, prompt: Any) -> None:
    async def main() -> None:
        with pytest.raises(QuireError):
            await shared.collect(prompt, SHORT, "a")
        with pytest.raises(InvalidParameter, match="tempreture"):
            await shared.collect([1], {"tempreture": 1}, "a")  # type: ignore[arg-type]
        with pytest.raises(InvalidParameter, match="request_id"):
            await shared.collect([1], SHORT, "")
        assert (await shared.collect([1], SHORT, "a"))[-1].finished
        await shared.settled()
        shared.assert_idle()

    run(main())


def test_a_tokenised_prompt_is_checked_alike_in_the_event_loop_and_in_a_thread(shared: Harness) -> None:
    async def main() -> None:
        params = SHORT.clone(seed=1)
        here, there = [await shared.collect(prompt, params, "a") for prompt in ({"prompt_token_ids": [1, 2]}, [1, 2])]
        assert here[-1].outputs == there[-1].outputs
        assert here[-1].prompt_token_ids == there[-1].prompt_token_ids == [1, 2]
        await shared.settled()

    run(main())


# -- ids ------------------------------------------------------------------------------------------------------


def test_of_two_requests_with_one_id_the_later_is_refused_and_the_engine_lives(shared: Harness) -> None:
    async def main() -> None:
        results = await asyncio.gather(
            shared.collect([1], SHORT, "same"), shared.collect([2], SHORT, "same"), return_exceptions=True
        )
        assert isinstance(results[1], InvalidParameter)
        assert isinstance(results[0], list)
        assert results[0][-1].outputs == await shared.final([1], SHORT)
        assert not shared.engine.errored

    run(main())


def test_an_id_that_comes_again_gets_nothing_of_the_request_that_had_it(shared: Harness) -> None:
    async def main() -> None:
        expected = await shared.final([2, 2], SHORT)
        stream = shared.engine.generate([1, 1], LONG, "again")
        await anext(stream)
        with shared.held():
            await until_reached(shared.gate.reached)  # a step of the old request is under way
            await stream.aclose()  # type: ignore[attr-defined]
            task = asyncio.create_task(shared.collect([2, 2], SHORT, "again"))
            while len(shared.parts.output_processor) == 0:  # until the new one is known
                await asyncio.sleep(0)
        assert (await task)[-1].outputs == expected

    run(main())


# -- death and close ------------------------------------------------------------------------------------------


async def assert_dead(harness: Harness, why: str) -> None:
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=why):
            await harness.collect([1], SHORT)


@pytest.mark.parametrize("how", ["executor", "result"])
def test_the_death_of_the_engine_ends_every_reader_and_every_later_call(own: Harness, how: str) -> None:
    async def main() -> None:
        with own.held():
            tasks = [asyncio.create_task(own.collect([index], LONG)) for index in range(12)]
            await until_reached(own.gate.reached)
            own.gate.error = EngineDeadError("worker lost") if how == "executor" else None
            own.gate.forgets_results = how == "result"
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} == {EngineDeadError}
        assert len({id(error) for error in errors}) == 12, "each reader needs an exception of its own to raise"
        assert own.engine.errored
        await assert_dead(own, "stopped")
        await own.engine.abort("nobody")

    run(main())


def test_a_request_that_was_tokenised_while_the_engine_died_is_told(own: Harness) -> None:
    async def main() -> None:
        own.tokenising.clear()
        own.may_finish.clear()
        late = asyncio.create_task(own.collect([1], SHORT))
        await asyncio.get_running_loop().run_in_executor(None, own.tokenising.wait, TIMEOUT)
        await asyncio.to_thread(own.engine.close)
        own.may_finish.set()
        with pytest.raises(EngineDeadError):
            await late

    run(main())


def test_a_request_that_makes_its_step_raise_ends_with_an_error_and_the_others_go_on(own: Harness) -> None:
    async def main() -> None:
        prompts = [[1], POISON, [2]]
        expected = [await own.final(prompt, SHORT) for prompt in (prompts[0], prompts[2])]
        with own.held():
            readers = asyncio.gather(*(own.collect(prompt, SHORT) for prompt in prompts))
            await until_reached(own.gate.reached)
        first, bad, last = await readers
        assert [first[-1].outputs, last[-1].outputs] == expected
        assert (bad[-1].finished, bad[-1].outputs[0].finish_reason) == (True, "error")
        assert "RuntimeError" in bad[-1].warnings[-1]
        await own.settled()
        own.assert_idle()

    run(main())


@pytest.mark.parametrize("from_thread", [False, True])
def test_close_ends_readers_and_the_thread_and_may_be_called_again(own: Harness, from_thread: bool) -> None:
    async def main() -> None:
        stream = own.engine.generate([1, 2], LONG)
        await anext(stream)
        waiting = asyncio.create_task(own.collect([5], LONG))
        await asyncio.sleep(0)
        for _ in range(2):
            if from_thread:
                await asyncio.to_thread(own.engine.close)
            else:
                own.engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="closed"):
            await waiting
        await assert_dead(own, "closed")
        assert not own.engine.errored, "it was stopped, it did not break"

    before = {thread.ident for thread in threading.enumerate() if thread.name == "quire-core"}
    run(main())
    after = {thread.ident for thread in threading.enumerate() if thread.name == "quire-core"}
    assert len(before - after) == 1
