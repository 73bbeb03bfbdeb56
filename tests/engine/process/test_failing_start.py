"""A core whose start hangs, raises or crashes: noticed in time, tried again where that can help, and told."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import httpx
import pytest

from quire import EngineArgs
from quire.engine.async_llm_engine import AsyncLLMEngine, EngineState
from quire.engine.process.restart_policy import RestartPolicy
from quire.engine.process.supervisor import CoreSupervisor
from quire.errors import EngineDeadError, EngineError
from quire.server.app import create_app
from quire.utils.threads import THREAD_FAILED_STATUS
from tests.engine.process.cores import ARGS, Launched, requests, run, transcripts, until_stage
from tests.engine.process.failing_start import MODULE, PROCESS, SCRIPT

STAGES = ("config", "imports", "ops", "weights", "kv cache", "trial step")
SOON = 5
"""--startup-timeout in seconds; on an idle machine a start of the embedded model takes less."""
PATIENT = 60
"""--startup-timeout where nothing hangs, in seconds."""
START = "from quire import LLM; LLM(kv_cache_memory_bytes=64 << 20, use_tqdm_on_load=False)"


@cache
def soon() -> int:
    """--startup-timeout in seconds where starts hang and others are good: no stage takes it, even on a busy machine."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", START], check=True, capture_output=True)
    return max(SOON, math.ceil(3 * (time.monotonic() - began)))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "starts"
    path.write_text("")
    monkeypatch.setenv(SCRIPT, str(path))
    return path


@asynccontextmanager
async def failing(script: Path, *lines: str, args: EngineArgs = ARGS, **policy: int) -> AsyncIterator[Launched]:
    """An engine that may still be starting, and whose starts do as the lines say."""
    script.write_text("".join(f"{line}\n" for line in lines))
    is_waited_for = any(line.startswith(("hang", "work")) for line in lines)
    timeout = policy.pop("startup_timeout", None) or (soon() if is_waited_for else PATIENT)
    options = {"max_engine_restarts": 10, "engine_restart_pause": 0, "startup_timeout": timeout, **policy}
    made = Launched(CoreSupervisor(args, RestartPolicy(**options), MODULE), None)
    try:
        yield made
    finally:
        made.engine.close()
        assert made.supervisor.core_pid is None


async def probe(engine: AsyncLLMEngine) -> tuple[int, int, str]:
    """Status of /health, status and text of /ready."""
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
        health, ready = await client.get("/health"), await client.get("/ready")
        assert (await client.get("/ping")).status_code == health.status_code
        return health.status_code, ready.status_code, ready.text


def test_a_restart_that_hangs_is_ended_and_no_token_changes(script: Path) -> None:
    async def main() -> None:
        async with failing(script, "good", "hang weights", "good") as core:
            await core.engine.wait_ready()
            assert (await probe(core.engine))[:2] == (200, 200)
            expected = await transcripts(core.engine, requests(300))
            work = asyncio.create_task(transcripts(core.engine, requests(300)))
            await core.kill_at_work()
            await core.until(EngineState.RESTARTING)
            await until_stage(core.engine, "weights")
            health, ready, text = await probe(core.engine)
            assert (health, ready) == (200, 503)
            assert "The engine is restarting (stage: weights)." in text
            assert await work == expected
            assert core.engine.num_restarts == 2, "the second core was killed, the third served"
            assert script.read_text() == ""

    run(main())


HANGS = tuple(f"hang {stage}" for stage in (PROCESS, *STAGES))


@pytest.mark.slow
def test_a_first_start_that_hangs_in_any_stage_is_ended_and_tried_again(script: Path) -> None:
    async def main() -> None:
        async with failing(script, *HANGS, "good", max_engine_restarts=len(HANGS)) as core:
            ready_soon = asyncio.create_task(core.engine.wait_ready())
            for stage in STAGES:
                await until_stage(core.engine, stage)
                health, ready, text = await probe(core.engine)
                assert (health, ready) == (200, 503)
                assert f"The engine is starting (stage: {stage})." in text
            await ready_soon
            assert (await probe(core.engine))[:2] == (200, 200)
            assert script.read_text() == ""

    run(main())


@pytest.mark.slow
def test_a_restart_that_hangs_in_any_stage_changes_no_token(script: Path) -> None:
    async def main() -> None:
        async with failing(script, "good", *HANGS) as core:
            await core.engine.wait_ready()
            expected = await transcripts(core.engine, requests(300))
            work = asyncio.create_task(transcripts(core.engine, requests(300)))
            await core.kill_at_work()
            assert await work == expected
            assert core.engine.num_restarts == 1 + len(HANGS)
            assert script.read_text() == ""

    run(main())


def test_starts_that_hang_are_not_tried_for_ever_and_then_health_fails(script: Path) -> None:
    async def main() -> None:
        policy = {
            "max_engine_restarts": 1,
            "startup_timeout": SOON,
            "engine_restart_window": 1,
        }  # which the second start outlasts
        async with failing(script, "hang config", "hang config", "good", **policy) as core:
            with pytest.raises(EngineDeadError, match=r"no progress for \d+ s in stage 'config'.*--startup-timeout"):
                await core.engine.wait_ready()
            assert core.engine.state is EngineState.DEAD
            assert (await probe(core.engine))[:2] == (503, 503)
            assert script.read_text() == "good\n"

    run(main())


@pytest.mark.slow
def test_a_stage_that_takes_longer_than_the_timeout_but_reports_progress_is_left_alone(script: Path) -> None:
    async def main() -> None:
        async with failing(script, "work kv cache") as core:
            await core.engine.wait_ready()
            assert core.engine.num_restarts == 0

    run(main())


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("raise config", r"OverflowError: a number of 400 digits"),
        ("raise weights", r"OverflowError: a number of 400 digits"),
        ("crash weights", r"SIGSEGV in its first start \(last heard of in stage '\w+'\)"),
    ],
)
def test_a_first_start_that_cannot_succeed_is_not_tried_again(script: Path, line: str, match: str) -> None:
    async def main() -> None:
        async with failing(script, line, "good") as core:
            with pytest.raises(EngineError, match=match):
                await core.engine.wait_ready()
            assert core.engine.num_restarts == 0
            assert script.read_text() == "good\n", "one start, no more"
            assert (await probe(core.engine))[:2] == (503, 503)

    run(main())


def test_a_restart_that_fails_once_is_tried_again(script: Path) -> None:
    async def main() -> None:
        async with failing(script, "good", "raise weights", "good") as core:
            await core.engine.wait_ready()
            expected = await transcripts(core.engine, requests(300)[:4])
            work = asyncio.create_task(transcripts(core.engine, requests(300)[:4]))
            await core.kill_at_work()
            assert await work == expected
            assert core.engine.num_restarts == 2

    run(main())


@pytest.mark.parametrize("num_kilobytes", [350, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_core_is_replaced_whatever_the_length_of_its_configuration(script: Path, num_kilobytes: int) -> None:
    async def main() -> None:
        overrides = {"padding": ["x" * 1000] * num_kilobytes}
        args = EngineArgs(max_model_len=512, kv_cache_memory_bytes=64 << 20, hf_overrides=overrides)
        async with failing(script, args=args) as core:
            await core.engine.wait_ready()
            expected = await transcripts(core.engine, requests(300)[:4])
            work = asyncio.create_task(transcripts(core.engine, requests(300)[:4]))
            await core.kill_at_work()
            await core.until(EngineState.RESTARTING)
            assert await work == expected
            assert core.engine.num_restarts == 1

    run(main())


def test_an_order_is_not_waited_for_by_the_supervisor(script: Path) -> None:
    """A core that hangs before it reads its order, which is longer than any buffer, is noticed like any other."""

    async def main() -> None:
        args = EngineArgs(max_model_len=512, kv_cache_memory_bytes=64 << 20, hf_overrides={"padding": "x" * (5 << 20)})
        async with failing(script, f"hang {PROCESS}", args=args, startup_timeout=1, max_engine_restarts=0) as core:
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await core.engine.wait_ready()

    run(main())


SUPERVISOR = """
import time
from quire import EngineArgs
from quire.engine.process.supervisor import CoreSupervisor

supervisor = CoreSupervisor(EngineArgs(model="/nowhere"))
supervisor.subscribe(lambda event: 1 / 0)
time.sleep(100)
"""


def test_a_supervisor_that_fails_ends_its_process() -> None:
    """Nobody would hear of the core any more, though /health would say 200."""
    done = subprocess.run([sys.executable, "-c", SUPERVISOR], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == THREAD_FAILED_STATUS
    assert "thread quire-supervisor failed" in done.stderr
