"""The pool of threads for what requests cause: bounded, fair, and without work that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextvars import copy_context
from typing import Any

import pytest

from quire.errors import EngineOverloaded, EngineUnavailable
from quire.utils.cancellation import check_cancelled
from quire.utils.work_pool import TURN_S, WorkPool, is_heavy, owner

TIMEOUT = 60


class Gate:
    """A job that has begun, and stands until it may go on."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_go = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_go.wait(TIMEOUT)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.may_go.set()


async def begun(gate: Gate) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, gate.begun.wait, TIMEOUT)


def started_as(key: int, work: Coroutine[Any, Any, Any], *, heavy: bool = False) -> asyncio.Task[Any]:
    """A task that asks for work on behalf of a key."""
    context = copy_context()
    context.run(owner.set, key)
    context.run(is_heavy.set, heavy)
    return asyncio.get_running_loop().create_task(work, context=context)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), TIMEOUT))


def test_a_job_gives_its_result_or_its_error() -> None:
    async def main() -> None:
        pool = WorkPool()
        assert await pool.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
        assert (pool.num_waiting, pool.num_running) == (0, 0)
        pool.close()

    run(main)


def test_the_job_of_a_coroutine_that_is_gone_never_runs(gate: Gate) -> None:
    async def main() -> None:
        pool = WorkPool(num_threads=1)
        ran: list[int] = []
        first = asyncio.create_task(pool.run(gate))
        await begun(gate)
        gone, stays = asyncio.create_task(pool.run(ran.append, 1)), asyncio.create_task(pool.run(ran.append, 2))
        await asyncio.sleep(0)
        assert pool.num_waiting == 2
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert pool.num_waiting == 1
        gate.may_go.set()
        await asyncio.gather(first, stays)
        assert ran == [2]
        pool.close()

    run(main)


def test_a_running_job_ends_at_its_next_check_when_nobody_waits() -> None:
    started, ended = threading.Event(), threading.Event()

    def endless() -> None:
        started.set()
        try:
            while True:
                check_cancelled()
        except Exception:  # what a template engine or a validator might catch
            raise AssertionError from None
        finally:
            ended.set()

    async def main() -> None:
        pool = WorkPool(num_threads=1)
        task = asyncio.create_task(pool.run(endless))
        await asyncio.get_running_loop().run_in_executor(None, started.wait, TIMEOUT)
        task.cancel()
        assert await asyncio.get_running_loop().run_in_executor(None, ended.wait, TIMEOUT)
        assert await pool.run(lambda: "next") == "next"
        pool.close()

    run(main)


def test_more_than_may_wait_is_refused(gate: Gate) -> None:
    async def main() -> None:
        pool, refused = WorkPool(num_threads=1, max_waiting=2), list[int]()
        pool.on_refused = lambda: refused.append(pool.num_waiting)
        tasks = [asyncio.create_task(pool.run(gate))]
        await begun(gate)
        tasks += [asyncio.create_task(pool.run(int)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(EngineOverloaded):
            await pool.run(int)
        assert refused == [2]
        gate.may_go.set()
        await asyncio.gather(*tasks)
        assert await pool.run(int) == 0
        pool.close()

    run(main)


def test_one_key_cannot_take_the_places_of_others(gate: Gate) -> None:
    async def main() -> None:
        pool = WorkPool(num_threads=1, max_waiting=4, max_waiting_per_owner=2)
        tasks = [asyncio.create_task(pool.run(gate))]
        await begun(gate)
        greedy = [started_as(1, pool.run(int)) for _ in range(5)]
        other = started_as(2, pool.run(int))
        await asyncio.sleep(0)
        gate.may_go.set()
        answers = await asyncio.gather(*greedy, return_exceptions=True)
        assert sum(isinstance(answer, EngineOverloaded) for answer in answers) == 3
        assert await other == 0
        await asyncio.gather(*tasks)
        pool.close()

    run(main)


def test_keys_take_turns(gate: Gate) -> None:
    async def main() -> None:
        pool = WorkPool(num_threads=1)
        order: list[str] = []
        tasks = [asyncio.create_task(pool.run(gate))]
        await begun(gate)
        tasks += [started_as(1, pool.run(order.append, f"a{i}")) for i in range(3)]
        tasks += [started_as(2, pool.run(order.append, f"b{i}")) for i in range(2)]
        await asyncio.sleep(0)
        gate.may_go.set()
        await asyncio.gather(*tasks)
        assert order == ["a0", "b0", "a1", "b1", "a2"]
        pool.close()

    run(main)


def test_heavy_work_leaves_a_thread_to_others(gate: Gate) -> None:
    async def main() -> None:
        pool = WorkPool(num_threads=3)
        heavy = [started_as(-1, pool.run(gate), heavy=True) for _ in range(5)]
        await begun(gate)
        assert await pool.run(lambda: "light") == "light"
        while pool.num_running < 2:
            await asyncio.sleep(0)
        assert (pool.num_running, pool.num_waiting) == (2, 3)
        gate.may_go.set()
        await asyncio.gather(*heavy)
        pool.close()

    run(main)


def test_long_jobs_take_turns_and_new_jobs_do_not_wait_for_them() -> None:
    computing: list[int] = []
    at_once: list[int] = []
    stop = threading.Event()

    def long() -> None:
        """From the second check on this is a long job: between two checks no other one may compute."""
        for beyond_first_turn in (False, *[True] * 10_000):
            time.sleep(TURN_S)
            check_cancelled()
            if stop.is_set():
                return
            if beyond_first_turn:
                computing.append(1)
                at_once.append(len(computing))
                time.sleep(0.001)
                computing.pop()

    async def main() -> None:
        pool = WorkPool()
        jobs = [started_as(-1, pool.run(long), heavy=True) for _ in range(3)]
        while len(at_once) < 20:
            assert await pool.run(lambda: "new") == "new"
        stop.set()
        await asyncio.gather(*jobs)
        assert max(at_once) == 1
        assert await pool.run(long) is None, "the turn was given back"
        pool.close()

    run(main)


def test_an_owner_leaves_threads_to_others(gate: Gate) -> None:
    async def main() -> None:
        pool = WorkPool(num_threads=4)
        greedy = [started_as(1, pool.run(gate)) for _ in range(8)]
        await begun(gate)
        assert await started_as(2, pool.run(lambda: "other")) == "other"
        while pool.num_running < 3:
            await asyncio.sleep(0)
        assert (pool.num_running, pool.num_waiting) == (3, 5)
        gate.may_go.set()
        await asyncio.gather(*greedy)
        pool.close()

    run(main)


def test_closing_ends_what_waits_and_refuses_what_is_new(gate: Gate) -> None:
    async def main() -> None:
        pool = WorkPool(num_threads=1)
        running = asyncio.create_task(pool.run(gate))
        await begun(gate)
        waiting = asyncio.create_task(pool.run(int))
        await asyncio.sleep(0)
        pool.close()
        pool.close()
        for answer in await asyncio.gather(running, waiting, return_exceptions=True):
            assert isinstance(answer, EngineUnavailable)
        with pytest.raises(EngineUnavailable):
            await pool.run(int)
        assert pool.num_waiting == 0

    run(main)


def test_a_thread_that_waits_keeps_no_result() -> None:
    class Large:
        pass

    async def main() -> None:
        pool = WorkPool(num_threads=1)
        result = weakref.ref(await pool.run(Large))
        await pool.run(int)  # the thread has let go of the job before
        gc.collect()
        assert result() is None
        pool.close()

    run(main)


def test_a_process_ends_though_a_job_does_not() -> None:
    program = (
        "import asyncio, threading\n"
        "from quire.utils.work_pool import WorkPool\n"
        "async def main():\n"
        "    started = threading.Event()\n"
        "    def stuck():\n"
        "        started.set()\n"
        "        threading.Event().wait()\n"
        "    task = asyncio.create_task(WorkPool().run(stuck))\n"
        "    while not started.is_set():\n"
        "        await asyncio.sleep(0)\n"
        "    task.cancel()\n"
        "asyncio.run(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=TIMEOUT, check=True).returncode == 0
