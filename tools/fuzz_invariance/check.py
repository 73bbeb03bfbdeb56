"""Runs a case, then each of its requests alone in a fresh engine, and compares bits."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial

from quire import CompletionOutput, RequestOutput
from quire.engine.front.input_processor import ProcessedRequest
from quire.outputs import TokenLogprobs
from tools.fuzz_invariance.cases import Case, EngineChoice
from tools.fuzz_invariance.engines import Engines
from tools.fuzz_invariance.faults import planted
from tools.fuzz_invariance.session import Session, play

NUM_QUIET_SESSIONS = 512
"""Engines that are kept for requests alone: making one takes as long as a third of a case."""
Bits = tuple[tuple[int, str, int | None], ...]
"""Of one position: (token, logprob, rank) of each candidate."""


@dataclass(slots=True)
class Verdict:
    """What a case has shown."""

    seed: int
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Checker:
    """Runs cases, and their requests alone."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.directory = engines.directory
        self._quiet_session = lru_cache(NUM_QUIET_SESSIONS)(partial(Session, engines, checks=False))

    def check(self, case: Case, fault: str | None = None) -> Verdict:
        """Whether each request of a case gets what it gets alone, `fault` being planted in the engine they share."""
        verdict = Verdict(case.seed)
        try:
            with planted(fault) if fault else nullcontext():
                session = play(self._engines, case, checks=fault is None)
        except Exception as error:
            verdict.problems.append(f"{type(error).__name__}: {error} ({_place(error)})")
            return verdict
        verdict.counts = session.counts
        for request_id, request in session.requests.items():
            verdict.counts["requests"] += 1
            answer, alone = session.answers.get(request_id), self.answer_alone(case.engine, request)
            may_fail = request_id in session.poisoned
            found = _differences(answer, alone, may_fail=may_fail) if answer else ["it has no answer"]
            if not request.core.sampling_params.is_streamable and (may_fail or request_id in session.aborted):
                continue  # the best of those completions that had ended by then
            verdict.problems += [f"request {request_id}: {text}" for text in found]
        return verdict

    def answer_alone(self, engine: EngineChoice, request: ProcessedRequest) -> RequestOutput:
        """What a request gets in an engine that computes the same, has nothing else to do and caches no prefix.

        It may have answered others before, one after the other: a new one for each takes half of the time of a case.
        """
        session = self._quiet_session(
            EngineChoice(
                model=engine.model,
                dtype=engine.dtype,
                kv_cache_dtype=engine.kv_cache_dtype,
                ops=engine.ops,
                block_size=engine.block_size,
                enable_prefix_caching=False,
            )
        )
        session.add(request)
        session.run()
        return session.answers.pop(request.core.request_id)


def _differences(got: RequestOutput, alone: RequestOutput, *, may_fail: bool) -> Iterator[str]:
    """What is not as it is alone. What was cut short must be a beginning of it."""
    scores, expected = _bits(got.prompt_logprobs), _bits(alone.prompt_logprobs)
    if scores != (expected[: len(scores)] if _is_cut(got) else expected):
        yield f"prompt logprobs differ: {_first(scores, expected)}"
    for mine, other in zip(got.outputs, alone.outputs, strict=True):
        for text in _of_branch(mine, other, may_fail=may_fail):
            yield f"branch {mine.index}: {text}"


def _is_cut(output: RequestOutput) -> bool:
    """Whether it was cut short."""
    return any(completion.finish_reason in ("abort", "error") for completion in output.outputs)


def _of_branch(got: CompletionOutput, alone: CompletionOutput, *, may_fail: bool) -> Iterator[str]:
    is_cut = got.finish_reason == "abort" or (got.finish_reason == "error" and may_fail)
    count = len(got.token_ids) if is_cut else None
    if list(got.token_ids) != list(alone.token_ids)[:count]:
        yield f"tokens differ: {_first(got.token_ids, alone.token_ids)}"
        return
    scores, expected = _bits(got.logprobs), _bits(alone.logprobs)
    if scores != expected[:count]:
        yield f"logprobs differ: {_first(scores, expected)}"
    ends = [(one.text, one.finish_reason, one.stop_reason, one.cumulative_logprob) for one in (got, alone)]
    if not is_cut and ends[0] != ends[1]:
        yield f"ends as {ends[0]}, alone as {ends[1]}"


def _bits(positions: list[TokenLogprobs] | list[TokenLogprobs | None] | None) -> list[Bits]:
    """Every bit of the logprobs, in an order that counts."""
    return [
        tuple((token_id, one.logprob.hex(), one.rank) for token_id, one in (position or {}).items())
        for position in positions or ()
    ]


def _first(got: list[int] | list[Bits], alone: list[int] | list[Bits]) -> str:
    """The first position that differs."""
    for index, (mine, other) in enumerate(zip(got, alone, strict=False)):
        if mine != other:
            return f"{mine} at {index}, alone {other}"
    return f"{len(got)} of them, alone {len(alone)}"


def _place(error: Exception) -> str:
    """Where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}, {frame.name}"
