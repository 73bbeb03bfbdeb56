"""What is left of a core that was killed: a private file with its last steps. And where the time of a request went."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.async_llm_engine import AsyncLLMEngine, EngineState
from quire.engine.front.why import NAMES, Timeline
from quire.engine.process.restart_policy import RestartPolicy
from quire.engine.process.trace_files import MAX_FILES, PAUSE_S, TraceFiles
from quire.errors import EngineUnavailable, RequestQuarantined
from quire.messages.stats import Phase, Wait
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind
from tests.engine.process import poisoned_core
from tests.engine.process.cores import LONG, Launched, SharedCore, launched, run, transcript
from tests.fakes import FakeCore
from tests.observability.traces import checked, slices

POISONED = "tests.engine.process.poisoned_core"


def policy_of(directory: Path) -> RestartPolicy:
    return RestartPolicy(max_engine_restarts=1000, engine_restart_pause=0, step_timeout=3, trace_dir=str(directory))


async def files_in(directory: Path, count: int = 1) -> list[Any]:
    """The traces in a directory, once there are so many."""
    while len(paths := sorted(directory.glob("quire-trace-*.json"), key=os.path.getmtime)) < count or any(
        not path.stat().st_size for path in paths
    ):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # the last bytes of the last one
    return [json.loads(path.read_bytes()) for path in paths]


def test_a_core_killed_from_outside_leaves_its_last_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")

    async def main() -> None:
        async with launched(policy_of(tmp_path)) as core:
            work = asyncio.create_task(transcript(core.engine, ("import os", LONG)))
            await core.kill_at_work(signal.SIGKILL)
            (trace,) = await files_in(tmp_path)
            assert (await work).finished
            events = checked(trace)
            assert trace["otherData"]["reason"] == "the engine process was killed by SIGKILL"
            numbers = [each["args"]["step"] for each in slices(events, "step")]
            assert numbers == [*range(1, len(numbers) + 1)]
            (request,) = slices(events, "request")
            assert request["args"]["unfinished"]
            assert request["args"]["outcome"] == "running"
            assert slices(events, "front")
            core.kill()  # idle, and with steps of its own: the request that went on
            again = (await files_in(tmp_path, 2))[1]
            assert "restart" in {each["name"] for each in checked(again)}
            await core.engine.wait_ready()

    run(main())
    path = next(tmp_path.iterdir())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    logged = [record.getMessage() for record in caplog.records if "quire-trace-" in record.getMessage()]
    assert any(str(path) in line and "SIGKILL" in line for line in logged)
    assert not any("import os" in other.read_text() for other in tmp_path.iterdir())


def test_a_core_that_crashes_or_hangs_shows_the_step_in_which_it_did(tmp_path: Path) -> None:
    async def main() -> None:
        async with launched(policy_of(tmp_path), module=POISONED) as core:
            for token_id, reason in ((poisoned_core.CRASH, "SIGSEGV"), (poisoned_core.HANG, "in one step")):
                with pytest.raises(RequestQuarantined):
                    await transcript(core.engine, ([token_id, 5], LONG))
                trace = (await files_in(tmp_path, 2))[-1]
                assert reason in trace["otherData"]["reason"]
                events = checked(trace)
                last = slices(events, "step")[-1]
                assert last["args"]["unfinished"]
                assert slices(events, "execute")[-1]["args"] == {"unfinished": True}
                assert slices(events, "request")[-1]["args"]["unfinished"]
                for path in tmp_path.iterdir():
                    path.unlink()

    run(main())


def test_a_request_that_is_quarantined_leaves_a_trace_and_many_leave_one(tmp_path: Path) -> None:
    async def main() -> None:
        async with launched(policy_of(tmp_path), module=POISONED) as core:
            for _ in range(3):
                output = await transcript(core.engine, ([poisoned_core.RAISE, 5], LONG))
                assert output.outputs[0].finish_reason == "error"
            (trace,) = await files_in(tmp_path)
            assert trace["otherData"]["reason"] == "a request was quarantined"
            marks = [each for each in checked(trace) if each["ph"] == "i"]
            assert [each["name"] for each in marks] == ["quarantined"]
            assert core.engine.num_restarts == 0

    run(main())


def test_a_core_that_is_closed_and_one_that_did_nothing_leave_no_file(tmp_path: Path) -> None:
    async def main() -> None:
        async with launched(policy_of(tmp_path)) as core:
            core.kill()
            await core.until(EngineState.RESTARTING)
            await core.engine.wait_ready()
            await transcript(core.engine, ("a", LONG.clone(max_tokens=3)))

    run(main())
    assert not list(tmp_path.iterdir())


def test_the_trace_of_a_running_core_can_be_had_and_a_caller_who_leaves_harms_nobody(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        before = len(slices(checked(await core.engine.trace()), "step"))
        await transcript(core.engine, ("a", LONG.clone(max_tokens=3)))
        left = [asyncio.create_task(core.engine.recording()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        events = checked(await core.engine.trace())
        assert len(slices(events, "step")) == before + 3
        core.kill()
        await core.until(EngineState.RESTARTING)
        with pytest.raises(EngineUnavailable, match="which the log names"):
            await core.engine.trace()
        await core.until(EngineState.READY)
        assert not slices(checked(await core.engine.trace()), "step")

    shared.run(main)


def test_files_are_bounded_and_requests_cannot_cause_many(tmp_path: Path) -> None:
    core = FakeCore()
    core.submit("a", [1, 2, 3], max_tokens=2)
    core.run()
    memory = core.lives.timelines.recorder.snapshot()
    now = [1000.0]
    files = TraceFiles(str(tmp_path / "new"), clock=lambda: now[0])
    for _ in range(MAX_FILES + 3):
        files.crashed(memory, "a crash")
    files.close()
    assert len(list((tmp_path / "new").iterdir())) == MAX_FILES
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    files = TraceFiles(str(tmp_path / "seldom"), clock=lambda: now[0])
    for moment in (0.0, 1.0, PAUSE_S - 1, PAUSE_S, PAUSE_S + 1):
        now[0] = 1000 + moment
        files.quarantined(memory, "a quarantine")
    files.close()
    assert len(list((tmp_path / "seldom").iterdir())) == 2


def test_a_directory_that_cannot_be_written_is_logged_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    core = FakeCore()
    core.submit("a", [1], max_tokens=1)
    core.run()
    files = TraceFiles(str(tmp_path / "file" / "below"))
    files.crashed(core.lives.timelines.recorder.snapshot(), "a crash")
    files.close()
    assert "--trace-dir" in caplog.text


# -- where the time went ------------------------------------------------------------------------------------------

CROWDED = EngineArgs(
    max_model_len=512, max_num_batched_tokens=64, max_num_seqs=4, num_gpu_blocks_override=32, block_size=16
)


async def explained(engine: AsyncLLMEngine, prompt: Any, params: SamplingParams) -> dict[str, Any]:
    """What is told of a request, beside the time that its caller has measured."""
    started_at = time.monotonic()
    timeline = Timeline(started_at)
    async for output in engine.generate(prompt, params):
        timeline.add(output)
    return timeline.explain() | {"measured_s": time.monotonic() - started_at}


def assert_attributed(facts: dict[str, Any]) -> None:
    """At least 98 % of what the caller has waited is named, and nothing counts twice."""
    named_s = sum(facts[name] for name in ("front_s", *NAMES.values(), "delivery_s"))
    assert named_s == pytest.approx(facts["total_s"], abs=1e-4), facts
    assert 0.98 * facts["measured_s"] <= named_s <= facts["measured_s"] + 1e-4, facts
    assert all(facts[name] >= -1e-6 for name in ("front_s", *NAMES.values(), "delivery_s")), facts
    waited_s = sum(facts[NAMES[phase]] for phase in (Phase.QUEUED, Phase.PREEMPTED, Phase.STALLED))
    assert sum(facts["held_s"].values()) == pytest.approx(waited_s, abs=1e-4), facts


def crowd() -> list[tuple[Any, SamplingParams]]:
    """More than fits: long and short prompts, several branches, all of some length."""
    params = SamplingParams(temperature=0.7, max_tokens=120, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    lengths = (3, 150, 40, 200, 5, 90, 120, 60)
    return [
        ({"prompt_token_ids": [(11 * i + j) % 900 for j in range(length)]}, params.clone(n=1 + (i % 4 == 2), seed=i))
        for i, length in enumerate(lengths)
    ]


def test_the_time_of_requests_that_queue_and_are_preempted_and_cut_into_chunks_is_attributed() -> None:
    async def main() -> None:
        with AsyncLLMEngine.launch(CROWDED) as engine:
            await engine.wait_ready()
            found = await asyncio.gather(*(explained(engine, *request) for request in crowd()))
        for facts in found:
            assert_attributed(facts)
        assert any(facts["preemptions"] and facts["preempted_s"] > 0 < facts["recompute_s"] for facts in found)
        assert any(facts["prefill_steps"] > 2 for facts in found)
        reasons = {name for facts in found for name in facts["held_s"]}
        assert {Wait.KV_CACHE, Wait.MAX_NUM_SEQS} & reasons

    run(main())


def test_the_time_of_requests_that_went_on_in_another_core_is_attributed(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        work = [asyncio.create_task(explained(core.engine, *request)) for request in crowd()]
        await core.kill_at_work()
        await core.until(EngineState.RESTARTING)
        found = await asyncio.gather(*work)
        for facts in found:
            assert_attributed(facts)
            assert facts["replays"] == 1
            assert facts["restart_s"] > 0
            assert "restart" in {span["phase"] for span in facts["timeline"]}

    shared.run(main)


def test_the_time_of_a_request_beside_one_that_crashes_cores_is_attributed() -> None:
    async def main() -> None:
        async with launched(module=POISONED) as core:
            good = asyncio.create_task(explained(core.engine, *crowd()[3]))
            with pytest.raises(RequestQuarantined):
                await transcript(core.engine, ([poisoned_core.CRASH, 5], LONG))
            facts = await good
            assert_attributed(facts)
            assert facts["replays"] == 2

    run(main())


def test_the_time_of_requests_whose_pages_are_loaded_is_attributed() -> None:
    async def main() -> None:
        with AsyncLLMEngine.launch(replace(CROWDED, kv_ram=16 << 20, kv_load_min_tokens=1)) as engine:
            await engine.wait_ready()
            for _ in range(2):  # the second time, what was evicted comes back
                found = await asyncio.gather(*(explained(engine, *request) for request in crowd()))
                for facts in found:
                    assert_attributed(facts)
            stats = engine.last_stats
            assert stats is not None
            assert stats.num_tier_loads > 0
        assert any(facts["cached_tokens"] for facts in found)
        spans = [span for facts in found for span in facts["timeline"]]
        assert any(Wait.LOADING.value in span.get("waited_for", {}) for span in spans), "what waits for a page says so"

    run(main())


def test_the_time_of_requests_beside_one_that_is_quarantined_is_attributed() -> None:
    async def main() -> None:
        async with launched(module=POISONED) as core:
            work = [asyncio.create_task(explained(core.engine, *request)) for request in crowd()]
            failed = await transcript(core.engine, ([poisoned_core.RAISE, 5], LONG))
            assert failed.outputs[0].finish_reason == "error"
            for facts in await asyncio.gather(*work):
                assert_attributed(facts)
            assert core.engine.num_restarts == 0

    run(main())


def test_metrics_have_vllms_names(shared: SharedCore) -> None:
    async def main(core: Launched) -> None:
        before = time.time()
        output: RequestOutput = await transcript(core.engine, ("import os", LONG.clone(max_tokens=4)))
        metrics = output.metrics
        assert metrics is not None
        moments = (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts)
        assert moments == (metrics.arrived_at, metrics.scheduled_at, metrics.first_token_at, metrics.last_token_at)
        assert list(moments) == sorted(moments)
        assert before - 0.01 <= metrics.arrival_time <= time.time()
        assert metrics.first_token_latency == metrics.first_token_at - metrics.received_at > 0
        assert metrics.num_preemptions == 0

    shared.run(main)
