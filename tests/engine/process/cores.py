"""Engines whose core is a process of its own, what is asked of them, and one that many tests share."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from quire import EngineArgs, SamplingParams
from quire.engine.async_llm_engine import AsyncLLMEngine, EngineState
from quire.engine.front.admission import AdmissionLimits
from quire.engine.process.restart_policy import RestartPolicy
from quire.engine.process.supervisor import CORE_MODULE, CoreSupervisor
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind

TIMEOUT = 240
DELTA = RequestOutputKind.DELTA
ARGS = EngineArgs(max_model_len=512, max_num_batched_tokens=64, max_num_seqs=32, kv_cache_memory_bytes=64 << 20)
"""A small token budget, so that prompts take several steps."""
PATIENT = RestartPolicy(max_engine_restarts=10_000, engine_restart_pause=0)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True, output_kind=DELTA)
FINAL = LONG.clone(output_kind=RequestOutputKind.FINAL_ONLY)

GATED: Any = {
    "ignore_eos": False,
    "structured_outputs": {"regex": r"[a-c]{3,6}\)!"},
    "gate": {
        "thinking": {"begin": {"text": "<t>"}, "end": {"text": "=="}, "is_open": True, "budget": 9, "forced": [65, 66]},
        "triggers": [{"text": "("}, {"text": "def "}],
    },
}
"""Calls after some thinking."""
Request = tuple[Any, SamplingParams]


def requests(num_tokens: int = 120) -> list[Request]:
    """One of each kind: greedy, drawn, forked, penalised, scored, stopped by a string, cut short by its end, the best
    of several, searched with beams, constrained by a grammar, by one that counts after triggers."""
    base = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=DELTA, logprobs=2, seed=1)
    many = [{"prompt_token_ids": [(7 * i + j) % 900 for j in range(200)]} for i in range(3)]
    return [
        ("import os", base.clone(temperature=0)),
        ("def read(", base.clone(seed=2)),
        ("class A:", base.clone(seed=3, n=3, temperature=0.9, top_p=0.9)),
        ("for i in", base.clone(seed=4, presence_penalty=1, frequency_penalty=0.5, repetition_penalty=1.2)),
        ("x = [", base.clone(seed=5, n=2, repetition_penalty=1.3, min_tokens=num_tokens // 3, top_k=30)),
        (many[0], base.clone(temperature=0, prompt_logprobs=1)),
        (many[1], base.clone(seed=6, n=2, prompt_logprobs=2)),
        (many[2], base.clone(seed=7, logprobs=None)),
        ("return", base.clone(seed=8, stop=["e", "\n\n"], min_tokens=num_tokens // 4)),
        (
            "if a",
            base.clone(
                seed=9,
                ignore_eos=False,
                min_tokens=num_tokens // 2,
                logit_bias={5: 2.0},
                output_kind=RequestOutputKind(0),
            ),
        ),
        ("while a", base.clone(seed=10, n=2, best_of=4, logprobs=None, output_kind=RequestOutputKind(0))),
        (
            "else",
            SamplingParams(
                temperature=0,
                seed=11,
                use_beam_search=True,
                n=3,
                beam_width=4,
                max_tokens=num_tokens,
                stop_token_ids=list(range(20, 34)),
                early_stopping="never",
                logprobs=2,
            ),
        ),
        ("{", base.clone(seed=12, n=3, ignore_eos=False, min_tokens=9, structured_outputs={"json_object": True})),
        ("0", base.clone(seed=13, ignore_eos=False, structured_outputs={"regex": "([0-9]{2,30},){20,80}"})),
        ("import os\n", base.clone(seed=14, n=2, min_tokens=num_tokens // 2, **GATED)),
    ]


async def first_output(engine: AsyncLLMEngine, request: Request, request_id: str) -> RequestOutput:
    return await anext(engine.generate(*request, request_id))


async def transcript(engine: AsyncLLMEngine, request: Request) -> RequestOutput:
    """All that a request gave, joined."""
    whole: RequestOutput | None = None
    async for output in engine.generate(*request):
        joins = whole is not None and request[1].output_kind is DELTA
        whole = whole.merged(output) if joins and whole is not None else output
    assert whole is not None
    return whole


def comparable(output: RequestOutput) -> Any:
    return output.outputs, output.prompt_logprobs, output.finished, output.seed, output.warnings


async def transcripts(engine: AsyncLLMEngine, chosen: list[Request]) -> list[Any]:
    return [comparable(out) for out in await asyncio.gather(*(transcript(engine, request) for request in chosen))]


class Launched:
    """An engine and the process that its core runs in."""

    def __init__(self, supervisor: CoreSupervisor, limits: AdmissionLimits | None) -> None:
        self.supervisor = supervisor
        self.engine = AsyncLLMEngine(supervisor, limits)

    @property
    def pid(self) -> int:
        pid = self.supervisor.core_pid
        assert pid is not None
        return pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    async def kill_at_work(self, number: int = signal.SIGKILL) -> None:
        """Send the signal while requests run, which must be too long to end at once."""
        while not self.engine.num_unfinished:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        self.kill(number)

    async def until(self, state: EngineState) -> None:
        """Return when the engine is in this state."""
        while self.engine.state is not state:
            await asyncio.sleep(0.005)


async def until_stage(engine: AsyncLLMEngine, stage: str) -> None:
    """Return when a start is in this stage."""
    while engine.stage != stage:
        await asyncio.sleep(0.01)


@asynccontextmanager
async def launched(
    policy: RestartPolicy = PATIENT, limits: AdmissionLimits | None = None, module: str = CORE_MODULE
) -> AsyncIterator[Launched]:
    made = Launched(CoreSupervisor(ARGS, policy, module), limits)
    try:
        await made.engine.wait_ready()
        yield made
    finally:
        made.engine.close()
        assert made.supervisor.core_pid is None


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(limited(main))


async def limited(main: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait_for(main, TIMEOUT)


class SharedCore:
    """One engine for tests that leave it as they found it: ready and without requests. Its process may be another."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._launched: Launched | None = None

    def run(self, main: Callable[[Launched], Coroutine[Any, Any, None]]) -> None:
        """Run a test with it. After one that fails there is another engine."""
        try:
            self._runner.run(limited(self._between(main)))
        except BaseException:
            self._runner.run(self._end())
            raise

    async def _between(self, main: Callable[[Launched], Coroutine[Any, Any, None]]) -> None:
        core = self._launched = self._launched or Launched(CoreSupervisor(ARGS, PATIENT), None)
        await core.engine.wait_ready()
        await main(core)
        await core.until(EngineState.READY)
        assert core.engine.num_unfinished == 0

    def close(self) -> None:
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        core, self._launched = self._launched, None
        if core is not None:
            core.engine.close()
            assert core.supervisor.core_pid is None
