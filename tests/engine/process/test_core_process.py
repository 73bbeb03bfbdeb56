"""A core in a process of its own: what is lost with it, which is nothing. Real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.async_llm_engine import AsyncLLMEngine, EngineState
from quire.engine.core_startup import create_config
from quire.engine.front.admission import AdmissionLimits
from quire.engine.identity import identity_of
from quire.engine.process.restart_policy import RestartPolicy
from quire.errors import (
    ConfigError,
    EngineDeadError,
    EngineOverloaded,
    EngineUnavailable,
    ModelNotFound,
    RequestQuarantined,
)
from quire.ops.cpu import library
from tests.engine.process import cores, poisoned_core
from tests.engine.process.cores import (
    ARGS,
    DELTA,
    FINAL,
    LONG,
    TIMEOUT,
    Launched,
    SharedCore,
    first_output,
    launched,
    requests,
    run,
    transcript,
    transcripts,
)


async def kill_while_running(core: Launched, rng: random.Random, work: asyncio.Task[Any], num_kills: int) -> int:
    """Kill the core at random moments until the work is done, or so often; how often it was hit."""
    kills = 0
    while kills < num_kills and not work.done():
        await core.until(EngineState.READY)
        await asyncio.sleep(rng.uniform(0, 0.25))
        if not work.done():
            core.kill()
            kills += 1
            await core.until(EngineState.RESTARTING)
    return kills


async def assert_replay(core: Launched, num_kills: int, seed: int) -> None:
    rng = random.Random(seed)
    chosen = requests()
    expected = await transcripts(core.engine, chosen)
    kills, num_restarts = 0, core.engine.num_restarts
    while kills < num_kills:
        work = asyncio.create_task(transcripts(core.engine, chosen))
        kills += await kill_while_running(core, rng, work, num_kills - kills)
        assert await work == expected
    assert core.engine.num_restarts == num_restarts + num_kills
    assert core.engine.num_unfinished == 0


def test_a_core_killed_at_random_moments_changes_no_token_and_no_logprob(shared: SharedCore) -> None:
    shared.run(lambda core: assert_replay(core, num_kills=4, seed=3))


@pytest.mark.slow
def test_two_hundred_kills(shared: SharedCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "TIMEOUT", 3600)
    shared.run(lambda core: assert_replay(core, num_kills=200, seed=4))


def test_a_stopped_core_is_noticed_and_replaced(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        expected = await transcripts(core.engine, requests(40))
        work = asyncio.create_task(transcripts(core.engine, requests(40)))
        stopped = core.pid
        await core.kill_at_work(signal.SIGSTOP)
        await core.until(EngineState.RESTARTING)
        assert await work == expected
        assert core.pid != stopped
        core.kill(signal.SIGSTOP)  # idle this time
        await core.until(EngineState.RESTARTING)
        await core.engine.wait_ready()

    shared.run(main)


def test_a_request_that_went_on_in_another_core_says_so(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        outputs = core.engine.generate("import os", LONG)
        last = await anext(outputs)
        core.kill()
        async for output in outputs:
            last = output
        assert last.effort is not None
        assert last.effort.num_replays == 1
        assert last.metrics is not None
        assert last.metrics.num_generation_tokens == LONG.max_tokens
        weights = core.engine.identity.weights
        assert core.engine.identity == identity_of(create_config(ARGS), weights)  # one has crossed processes

    shared.run(main)


def test_totals_go_on_in_another_core(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        await transcript(core.engine, ("a", LONG))
        before = core.engine.last_stats
        assert before is not None
        core.kill()
        await core.until(EngineState.RESTARTING)
        await core.until(EngineState.READY)
        await transcript(core.engine, ("b", LONG))
        after = core.engine.last_stats
        assert after is not None
        assert after.num_generation_tokens - before.num_generation_tokens == LONG.max_tokens
        assert after.num_steps > before.num_steps > 0
        assert sum(after.steps_by_tokens.values()) == after.num_steps
        assert after.num_free_blocks == after.num_total_blocks == before.num_total_blocks

    shared.run(main)


def test_signals_for_the_whole_group_are_not_for_the_core(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        pid = core.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            core.kill(number)
            assert (await transcript(core.engine, ("a", LONG.clone(max_tokens=5)))).finished
        assert core.pid == pid

    shared.run(main)


def test_restarts_are_limited_and_the_end_is_told() -> None:
    async def main() -> None:
        async with launched(RestartPolicy(max_engine_restarts=1, engine_restart_pause=0)) as core:
            running = asyncio.create_task(transcript(core.engine, ("a", LONG)))
            core.kill()
            await core.until(EngineState.RESTARTING)
            await core.until(EngineState.READY)
            core.kill()
            await core.until(EngineState.DEAD)
            with pytest.raises(EngineDeadError, match=r"SIGKILL.*1 restart in 600 s.*--max-engine-restarts"):
                await running
            for asked in (
                core.engine.wait_ready(),
                transcript(core.engine, ("a", LONG)),
                core.engine.reset_prefix_cache(),
            ):
                with pytest.raises(EngineDeadError):
                    await asked
            assert core.engine.errored
            assert core.engine.why_dead is not None

    run(main())


def test_a_request_that_crashes_every_core_is_found_and_the_others_lose_nothing() -> None:
    async def main() -> None:
        async with launched(module="tests.engine.process.poisoned_core") as core:
            chosen = requests(30)
            expected = await transcripts(core.engine, chosen)
            bad = asyncio.create_task(transcript(core.engine, ([poisoned_core.CRASH, 5], LONG)))
            got = await transcripts(core.engine, chosen)
            with pytest.raises(RequestQuarantined, match=r"not run again.*was killed by SIGSEGV"):
                await bad
            assert got == expected
            assert core.engine.num_restarts == 2
            assert await transcripts(core.engine, chosen[:2]) == expected[:2]

    run(main())


def test_branches_whose_first_token_was_lost_with_the_core_are_not_lost(shared: SharedCore) -> None:
    prompt = {"prompt_token_ids": [(7 * i) % 900 for i in range(150)]}
    params = SamplingParams(n=4, max_tokens=20, min_tokens=20, seed=3, temperature=0.9, output_kind=DELTA)
    expected: list[Any] = []

    async def main(core: Launched) -> None:
        expected.extend(await transcripts(core.engine, [(prompt, params)]))

    async def split() -> None:
        async with launched(module="tests.engine.process.splitting_core") as core:
            assert await transcripts(core.engine, [(prompt, params)]) == expected
            assert core.engine.num_restarts == 1

    shared.run(main)
    run(split())


def test_a_step_that_hangs_is_ended() -> None:
    async def main() -> None:
        policy = RestartPolicy(max_engine_restarts=9, engine_restart_pause=0, step_timeout=3)
        async with launched(policy, module="tests.engine.process.poisoned_core") as core:
            good = asyncio.create_task(transcript(core.engine, ("a", LONG.clone(max_tokens=20))))
            with pytest.raises(RequestQuarantined, match="in one step"):
                await transcript(core.engine, ([poisoned_core.HANG, 5], LONG))
            assert len((await good).outputs[0].token_ids) == 20

    run(main())


def test_a_request_that_is_left_while_there_is_no_core_stays_left(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        leaver = asyncio.create_task(transcript(core.engine, ("a", LONG)))
        aborted = asyncio.create_task(first_output(core.engine, ("b", FINAL), "b"))
        stayer = asyncio.create_task(transcript(core.engine, ("c", LONG.clone(max_tokens=40))))
        await asyncio.sleep(0.1)
        core.kill()
        await core.until(EngineState.RESTARTING)
        leaver.cancel()
        await core.engine.abort("b")
        late = asyncio.create_task(transcript(core.engine, ("d", LONG.clone(max_tokens=3))))
        assert (await aborted).outputs[0].finish_reason == "abort"
        assert len((await stayer).outputs[0].token_ids) == 40
        assert len((await late).outputs[0].token_ids) == 3
        await asyncio.sleep(0.1)
        stats = core.engine.last_stats
        assert stats is not None
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_total_blocks

    shared.run(main)


def test_the_queue_is_bounded_and_the_drained_engine_takes_nothing() -> None:
    async def main() -> None:
        async with launched(limits=AdmissionLimits(max_queued_requests=3, max_queued_tokens=300)) as core:
            prompt = {"prompt_token_ids": [5] * 200}
            results = await asyncio.gather(
                *(transcript(core.engine, (prompt, LONG.clone(max_tokens=2))) for _ in range(6)), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, EngineOverloaded)]
            assert len(refused) == 5
            assert all(error.retry_after >= 1 for error in refused)
            assert core.engine.num_queued == 0
            running = asyncio.create_task(transcript(core.engine, ("a", LONG.clone(max_tokens=50))))
            await asyncio.sleep(0)
            core.engine.drain()
            assert core.engine.state is EngineState.DRAINING
            with pytest.raises(EngineUnavailable, match="shutting down"):
                await transcript(core.engine, ("a", LONG))
            assert len((await running).outputs[0].token_ids) == 50

    run(main())


def test_the_prefix_cache_can_be_emptied_from_outside(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        request = ({"prompt_token_ids": [9] * 100}, LONG.clone(max_tokens=2))
        assert (await transcript(core.engine, request)).num_cached_tokens == 0
        assert (await transcript(core.engine, request)).num_cached_tokens > 0
        await core.engine.reset_prefix_cache()
        assert (await transcript(core.engine, request)).num_cached_tokens == 0

    shared.run(main)


def test_a_core_that_cannot_start_says_why_and_is_not_tried_again() -> None:
    async def main(args: EngineArgs, kind: type[ConfigError], match: str) -> None:
        engine = AsyncLLMEngine.launch(args)
        with pytest.raises(kind, match=match):
            await engine.wait_ready()
        with pytest.raises(EngineDeadError, match=match):
            await transcript(engine, ("a", LONG))
        assert engine.num_restarts == 0
        engine.close()

    run(main(EngineArgs(model="/nowhere/at/all"), ModelNotFound, "nowhere"))
    run(main(EngineArgs(max_model_len=100, num_gpu_blocks_override=1), ConfigError, "KV cache holds"))


def test_starting_engine_knows_no_tokenizer_yet() -> None:
    async def main() -> None:
        engine = AsyncLLMEngine.launch(ARGS)
        assert str(engine.state) == "starting"
        with pytest.raises(EngineUnavailable, match="starting"):
            _ = engine.tokenizer
        assert len((await transcript(engine, ("a", LONG.clone(max_tokens=4)))).outputs[0].token_ids) == 4
        engine.close()
        assert str(engine.state) == "dead"

    run(main())


@pytest.mark.skipif(
    not library.available() or library.isa() == "avx2", reason="needs two instruction sets to choose from"
)
def test_a_core_that_would_compute_otherwise_does_not_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with launched() as core:
            work = asyncio.create_task(transcript(core.engine, ("import os", LONG)))
            monkeypatch.setenv("QUIRE_CPU_ISA", "avx2")
            await core.kill_at_work()
            with pytest.raises(EngineDeadError, match=r"installation has changed .* not avx2.*restart the server"):
                await work
            assert core.engine.state is EngineState.DEAD

    run(main())


FRONT = """
import asyncio, sys
from quire import EngineArgs, SamplingParams
from quire.engine.async_llm_engine import AsyncLLMEngine

async def main():
    engine = AsyncLLMEngine.launch(EngineArgs(kv_cache_memory_bytes=64 << 20))
    await engine.wait_ready()
    print(engine._source.core_pid, flush=True)
    async for _ in engine.generate("a", SamplingParams(max_tokens=1000, ignore_eos=True)):
        pass
    await asyncio.sleep(1000)

asyncio.run(main())
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("stop_core_first", [False, True])
def test_a_core_ends_with_its_front(stop_core_first: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, text=True) as front:
        assert front.stdout is not None
        pid = int(front.stdout.readline())
        if stop_core_first:
            os.kill(pid, signal.SIGSTOP)
        front.kill()
    deadline = time.monotonic() + TIMEOUT
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the core outlived its front"
        time.sleep(0.02)
