"""`LLMEngine`: streams that add up, aborts in every phase, and nothing left behind."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.config.flags.args import EngineArgs
from quire.engine.llm_engine import LLMEngine
from quire.errors import InvalidParameter, QuireError
from quire.executor.base import Executor
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind
from tests.conftest import Checkpoint
from tests.expert_checkpoints import VOCAB_SIZE

KINDS = list(RequestOutputKind)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Iterator[LLMEngine]:
    """Few blocks and few tokens a step: chunks and preemption are common."""
    args = EngineArgs(
        model=str(checkpoint("llama")),
        dtype="float32",
        max_model_len=64,
        block_size=8,
        num_gpu_blocks_override=14,
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )
    with LLMEngine.from_engine_args(args) as engine:
        yield engine


def assert_idle(engine: LLMEngine) -> None:
    """No request anywhere: not in the scheduler, not in the front, no block in use."""
    core = engine.parts.core
    core.lives.check()
    assert not engine.has_unfinished_requests()
    assert engine.get_num_unfinished_requests() == 0
    assert not core.lives.groups
    assert not core.scheduler.waiting
    assert not core.scheduler.running
    assert core.scheduler.blocks.pool.num_free == core.scheduler.blocks.pool.num_blocks


def drain(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.parts.core.lives.check()
    return outputs


def joined(outputs: list[RequestOutput]) -> dict[int, CompletionOutput]:
    """The completions that a reader of deltas puts together."""
    whole: dict[int, CompletionOutput] = {}
    for output in outputs:
        for delta in output.outputs:
            before = whole.get(delta.index)
            assert before is None or before.finish_reason is None, "a completion speaks after its end"
            if before is None:
                whole[delta.index] = delta
                continue
            before.text += delta.text
            before.token_ids = before.token_ids + delta.token_ids
            if before.logprobs is not None:
                before.logprobs = before.logprobs + (delta.logprobs or [])
            before.cumulative_logprob = delta.cumulative_logprob
            before.finish_reason, before.stop_reason = delta.finish_reason, delta.stop_reason
    return whole


def random_request(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
    fields: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "temperature": rng.choice([0.0, 0.7, 1.0]),
        "max_tokens": rng.randrange(1, 30),
        "logprobs": rng.choice([None, 0, 2]),
        "prompt_logprobs": rng.choice([None, None, 1]),
        "stop": rng.sample("abcdefghijklmnopqrstuvwxyz", rng.choice([0, 2, 6])),
        "include_stop_str_in_output": rng.random() < 0.5,
        "min_tokens": rng.choice([0, 0, 1]),
        "ignore_eos": rng.random() < 0.5,
        "skip_special_tokens": rng.random() < 0.5,
    }
    if fields["temperature"]:
        fields["n"] = rng.choice([1, 1, 3])
    return prompt, fields


@pytest.mark.parametrize("seed", range(4))
def test_what_is_streamed_adds_up_to_the_final_output(engine: LLMEngine, seed: int) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(8)]
    final: dict[RequestOutputKind, list[RequestOutput]] = {}
    for kind in KINDS:
        for index, (prompt, fields) in enumerate(requests):
            engine.add_request(str(index), prompt, SamplingParams(**fields, output_kind=kind))
        streams = drain(engine)
        for stream in streams.values():
            assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]
            assert all(output.metrics is None for output in stream[:-1])
        final[kind] = [streams[str(index)][-1] for index in range(len(requests))]
        for index, (prompt, fields) in enumerate(requests):
            stream = streams[str(index)]
            if kind is RequestOutputKind.FINAL_ONLY:
                assert len(stream) == 1
            if kind is RequestOutputKind.CUMULATIVE:
                texts = [output.outputs[0].text for output in stream]
                assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
            if kind is RequestOutputKind.DELTA:
                expected = final[RequestOutputKind.CUMULATIVE][index]
                assert sorted(joined(stream).items()) == [(c.index, c) for c in expected.outputs]
                given = [output.prompt_logprobs for output in stream if output.prompt_logprobs is not None]
                assert given == ([] if fields["prompt_logprobs"] is None else [expected.prompt_logprobs])
                assert expected.prompt_logprobs is None or len(expected.prompt_logprobs) == len(prompt)
    for cumulative, whole in zip(final[RequestOutputKind.CUMULATIVE], final[RequestOutputKind.FINAL_ONLY], strict=True):
        assert cumulative.outputs == whole.outputs
        assert cumulative.prompt_logprobs == whole.prompt_logprobs
    assert_idle(engine)


def test_deltas_merged_for_a_slow_reader_add_up_too(engine: LLMEngine) -> None:
    rng = random.Random(11)
    requests = [random_request(rng) for _ in range(8)]
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        for index, (prompt, fields) in enumerate(requests):
            engine.add_request(f"{index}-{kind}", prompt, SamplingParams(**fields, output_kind=kind))
    streams = drain(engine)
    for index in range(len(requests)):
        stream = streams[f"{index}-{int(RequestOutputKind.DELTA)}"]
        merged = stream[0]
        for output in stream[1:]:
            merged = merged.merged(output)
        (expected,) = streams[f"{index}-{int(RequestOutputKind.FINAL_ONLY)}"]
        assert merged.outputs == expected.outputs
        assert merged.prompt_logprobs == expected.prompt_logprobs


# -- abort ----------------------------------------------------------------------------------------------------

LONG = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
PHASES: dict[str, Callable[[LLMEngine], None]] = {
    "queued": lambda engine: None,
    "prefilling": lambda engine: steps(engine, 1),
    "decoding": lambda engine: steps(engine, 5),
}


def steps(engine: LLMEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", KINDS)
def test_abort_ends_a_request_in_any_phase_and_frees_its_blocks(
    engine: LLMEngine, phase: str, n: int, kind: RequestOutputKind
) -> None:
    params = LONG.clone(n=n, temperature=1.0, seed=1, output_kind=kind)
    engine.add_request("a", list(range(30)), params)
    engine.add_request("other", [1, 2, 3], LONG)
    PHASES[phase](engine)
    (output,) = engine.abort_request("a")
    assert output.request_id == "a"
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * n
    assert output.metrics is not None
    engine.parts.core.lives.check()
    assert engine.get_num_unfinished_requests() == 1
    assert len(drain(engine)["other"][-1].outputs[0].token_ids) == 20
    assert_idle(engine)


def test_deltas_before_and_at_an_abort_add_up_to_what_was_produced(engine: LLMEngine) -> None:
    params = LONG.clone(output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", [5, 6, 7], params)
    before = [output for _ in range(6) for output in engine.step()]
    whole = joined([*before, *engine.abort_request("a")])[0]
    engine.add_request("b", [5, 6, 7], LONG)
    expected = drain(engine)["b"][-1].outputs[0]
    assert whole.token_ids == expected.token_ids[:6]
    decode = engine.parts.tokenizer.decode if engine.parts.tokenizer is not None else None
    assert decode is not None
    assert whole.text == decode(whole.token_ids)


def test_a_branch_that_ended_before_the_abort_keeps_its_reason(engine: LLMEngine) -> None:
    params = LONG.clone(n=3, temperature=1.0, seed=2, stop=list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOP"))
    for kind in (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA):
        engine.add_request("a", [9], params.clone(output_kind=kind))
        seen: dict[int, str] = {}
        while not seen:
            for output in engine.step():
                seen |= {c.index: c.finish_reason for c in output.outputs if c.finish_reason is not None}
        assert len(seen) < 3
        (last,) = engine.abort_request("a")
        shown = {completion.index: completion.finish_reason for completion in last.outputs}
        if kind is RequestOutputKind.DELTA:
            assert not shown.keys() & seen.keys(), "its end was reported already"
        assert {**shown, **seen} == {i: seen.get(i, "abort") for i in range(3)}
        assert_idle(engine)


def test_abort_of_finished_and_unknown_requests_does_nothing(engine: LLMEngine) -> None:
    engine.add_request("a", [1], LONG)
    drain(engine)
    assert engine.abort_request(["a", "nobody"]) == []
    assert_idle(engine)


def test_many_are_aborted_at_once(engine: LLMEngine) -> None:
    for index in range(9):
        engine.add_request(str(index), [index] * 9, LONG)
    steps(engine, 3)
    assert {output.request_id for output in engine.abort_request([str(i) for i in range(9)])} == set("012345678")
    assert_idle(engine)


def test_the_worker_forgets_aborted_sequences_before_it_learns_new_ones(engine: LLMEngine) -> None:
    for round in range(5):  # more sequences than the worker has rows, if any stayed behind
        for index in range(6):
            engine.add_request(f"{round}/{index}", [index + 1] * 3, LONG)
        steps(engine, 2)
        engine.abort_request([f"{round}/{index}" for index in range(6)])
    engine.add_request("last", [1], LONG)
    assert drain(engine)["last"][-1].outputs[0].finish_reason == "length"
    assert_idle(engine)


class Interrupted:
    """Ctrl-C in some steps: before the worker hears of the step, or when it is done and nobody has seen the result."""

    def __init__(self, inner: Executor, rng: random.Random) -> None:
        self.inner = inner
        self.rng = rng
        self.num_interrupts = 0

    def execute(self, plan: SchedulerOutputs) -> ModelRunnerOutput:
        when = self.rng.choice(["before", "after", "never", "never"])
        self.num_interrupts += when != "never"
        if when == "before":
            raise KeyboardInterrupt
        result = self.inner.execute(plan)
        if when == "after":
            raise KeyboardInterrupt
        return result

    def close(self) -> None:
        self.inner.close()


@pytest.mark.parametrize("seed", range(4))
def test_an_interrupted_step_costs_time_but_changes_no_token(engine: LLMEngine, seed: int) -> None:
    rng = random.Random(50 + seed)
    requests = [random_request(rng) for _ in range(12)]
    core, results = engine.parts.core, []
    for disturbed in (False, True):
        inner = core.executor
        if disturbed:
            core.executor = interrupted = Interrupted(inner, rng)
        done: dict[str, RequestOutput] = {}
        for index, (prompt, fields) in enumerate(requests):
            engine.add_request(str(index), prompt, SamplingParams(**fields))
        while engine.has_unfinished_requests():
            with contextlib.suppress(KeyboardInterrupt):
                done |= {output.request_id: output for output in engine.step()}
            core.lives.check()
        core.executor = inner
        results.append([(done[str(i)].outputs, done[str(i)].prompt_logprobs) for i in range(len(requests))])
    assert interrupted.num_interrupts > 10
    assert results[0] == results[1]
    assert_idle(engine)


# -- adding ---------------------------------------------------------------------------------------------------


def test_requests_may_be_added_while_others_run(engine: LLMEngine) -> None:
    prompts = [[i + 1, 2 * i + 1] for i in range(6)]
    alone = []
    for prompt in prompts:
        engine.add_request("x", prompt, LONG)
        alone.append(drain(engine)["x"][-1].outputs)
    together: dict[str, RequestOutput] = {}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, LONG)
        together |= {output.request_id: output for _ in range(3) for output in engine.step()}
    together |= {request_id: outputs[-1] for request_id, outputs in drain(engine).items()}
    assert [together[str(index)].outputs for index in range(6)] == alone


def test_an_id_in_use_is_refused_and_may_come_again_afterwards(engine: LLMEngine) -> None:
    engine.add_request("a", [1], LONG)
    with pytest.raises(InvalidParameter, match="in use"):
        engine.add_request("a", [2], LONG)
    drain(engine)
    engine.add_request("a", [2], LONG)
    drain(engine)
    assert_idle(engine)


@pytest.mark.parametrize("prompt", ["", [], [VOCAB_SIZE], [1] * 64, {"promt": "a"}, 7])
def test_a_refused_request_leaves_nothing_behind(engine: LLMEngine, prompt: Any) -> None:
    with pytest.raises(QuireError):
        engine.add_request("bad", prompt, LONG)
    assert_idle(engine)


def test_statistics_say_how_full_the_engine_is(engine: LLMEngine) -> None:
    before = engine.parts.core.scheduler.stats(SchedulerOutputs())
    engine.add_request("a", list(range(20)), LONG)
    engine.add_request("b", list(range(20, 40)), LONG)
    engine.step()
    stats = engine.last_stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.num_batched_tokens) == (2, 0, 24)
    assert stats.num_free_blocks == stats.num_total_blocks - 4
    drain(engine)
    assert engine.last_stats is not None
    stats = engine.last_stats
    assert (stats.num_running, stats.num_free_blocks, stats.num_shared_blocks) == (0, 14, 0)
    assert stats.num_cached_blocks > 0
    assert stats.num_first_tokens - before.num_first_tokens == 2
    assert stats.num_generation_tokens - before.num_generation_tokens == 40
    assert stats.num_steps - before.num_steps >= 20
    assert stats.step_time_s > before.step_time_s


# -- any sequence of events -----------------------------------------------------------------------------------

REQUESTS = [random_request(random.Random(100 + i)) for i in range(8)]
"""A few requests that come again and again, so that prefixes are shared and the expected tokens are computed once."""
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(REQUESTS) - 1)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
)


@pytest.fixture(scope="module")
def alone(engine: LLMEngine) -> list[list[CompletionOutput]]:
    results = []
    for prompt, fields in REQUESTS:
        engine.add_request("alone", prompt, SamplingParams(**fields))
        results.append(drain(engine)["alone"][-1].outputs)
        engine.reset_prefix_cache()
    return results


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, max_size=25))
def test_any_sequence_of_events_gives_every_request_the_tokens_it_gets_alone(
    engine: LLMEngine, alone: list[list[CompletionOutput]], actions: list[tuple[str, int]]
) -> None:
    added: list[int] = []
    aborted: set[str] = set()
    done: dict[str, list[CompletionOutput]] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done
                done[output.request_id] = output.outputs
        engine.parts.core.lives.check()

    for action, argument in actions:
        if action == "add":
            prompt, fields = REQUESTS[argument]
            engine.add_request(str(len(added)), prompt, SamplingParams(**fields))
            added.append(argument)
        elif action == "step":
            for _ in range(argument):
                step()
        else:
            aborted |= {output.request_id for output in engine.abort_request(str(argument))}
            engine.parts.core.lives.check()
    while engine.has_unfinished_requests():
        step()
    assert done.keys() | aborted == set(map(str, range(len(added))))
    for request_id, outputs in done.items():
        assert outputs == alone[added[int(request_id)]]
    assert_idle(engine)
