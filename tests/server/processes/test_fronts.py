"""Several fronts answer as one server: counts and limits hold for all of them together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from quire.messages.codec import FrameReader
from quire.observability.samples import Samples, add_samples
from quire.server.processes.link import LINK, Ask, FrontReport, ParentLink, Reports
from quire.server.processes.peers import LinkedPeers
from quire.server.processes.shared_counts import SharedCounts, new_memory
from tests.observability.traces import checked, slices
from tests.server.api.test_admin import series
from tests.server.processes.test_processes import Server, served, wait_for

TWO = ("--api-server-count", "2")


@contextmanager
def only(server: Server, front: int) -> Iterator[None]:
    """Connections are taken by one front: the others are stopped."""
    others = [pid for pid in server.pids("front_process") if pid != front]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def generated(server: Server) -> tuple[float, float]:
    text = server.client.get("/metrics").text
    tokens, requests = (series(text, f"quire:{name}_total") for name in ("generation_tokens", "request_success"))
    assert tokens == series(text, "vllm:generation_tokens_total")
    assert requests == series(text, "quire:e2e_request_latency_seconds_count")
    assert 0 < series(text, "quire:inter_token_latency_seconds_count") <= tokens - requests  # chunks may be merged
    return tokens, requests


def test_every_front_answers_for_all_and_for_those_that_ended(tmp_path: Path) -> None:
    with served(tmp_path, *TWO) as server:
        first, second = server.pids("front_process")
        for front, count in ((first, 3), (second, 5)):
            with only(server, front):
                for _ in range(count):
                    assert server.complete("import os", 4)[3] == "length"
        for front in (first, second):
            assert generated(server) == (32, 8), "from now on the parent knows both"
            with only(server, front):
                assert generated(server) == (32, 8)
        with only(server, first):
            stats = server.client.get("/v1/stats").json()["stats"]
            assert stats["num_generation_tokens"] == 32, "the core tells fronts that have no requests, too"
        os.kill(second, signal.SIGKILL)
        wait_for(lambda: second not in server.pids("front_process"))
        wait_for(lambda: len(server.pids("front_process")) == 2)
        wait_for(lambda: generated(server) == (32, 8))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_what_runs_in_one_front_counts_in_the_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool, served(tmp_path, *TWO, "--max-concurrent-requests", "3") as server:
        first, _ = server.pids("front_process")
        started = [Event() for _ in range(3)]
        with only(server, first):
            streams = [pool.submit(server.complete, "import os", 900, event, n=16) for event in started]
            assert all(event.wait(60) for event in started)
            assert server.client.get("/v1/stats").json()["num_requests"] == 3
        os.kill(first, signal.SIGSTOP)
        assert server.client.get("/load").json()["server_load"] == 3
        assert server.client.get("/v1/stats").json()["num_requests"] >= 0
        status, body = server.complete("import os", 4)
        assert (status, "3 requests in progress" in body["error"]["message"]) == (429, True)
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: server.client.get("/load").json()["server_load"] == 0)
        assert server.complete("import os", 4)[3] == "length"
        for stream in streams:
            assert stream.exception(60) is not None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_requests_of_one_front_can_be_watched_through_the_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool, served(tmp_path, *TWO, "--max-num-seqs", "1") as server:
        first, second = server.pids("front_process")
        with only(server, first):
            started = Event()
            streams = [pool.submit(server.complete, "import os", 900, started) for _ in range(16)]
            assert started.wait(60)
            wait_for(lambda: server.client.get("/v1/stats").json()["num_requests"] >= 8)
        with only(server, second):
            told = server.client.get("/v1/stats", params={"activity": True}).json()["activity"]
        ids = [request["id"] for request in told["requests"]]
        assert told["num_running"] == 1
        assert len(set(ids)) == len(ids) == 1 + told["num_waiting"] > 1
        assert all(len(name) == len("0" * 32 + "-0") for name in ids), "nothing of the front or of the core in them"
        os.kill(first, signal.SIGKILL)
        assert all(stream.exception(60) is not None or stream.result()[3] == "length" for stream in streams)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_the_parent_knows_what_a_front_says_before_anybody_else() -> None:
    parent, theirs = socket.socketpair()
    counted: Samples = {"a": {("a_total", ()): 1.0}}

    async def ask() -> list[FrontReport]:
        link = ParentLink(theirs)
        peers = LinkedPeers(link, SharedCounts(1, 0))
        peers.answer_with(lambda: FrontReport(samples=counted))
        reports = asyncio.create_task(peers.reports())
        reader = FrameReader(LINK)
        await asyncio.sleep(0)
        (asked,) = reader.feed(parent.recv(1 << 16, socket.MSG_DONTWAIT))
        assert isinstance(asked, Ask)
        counted["a"]["a_total", ()] = 2.0
        link.on_reports(Reports(call_id=asked.call_id, reports=[FrontReport(num_queued=7)]))
        others = await reports
        (told,) = reader.feed(parent.recv(1 << 16, socket.MSG_DONTWAIT))
        assert told == FrontReport(samples={"a": {("a_total", ()): 2.0}})
        return others

    with parent, theirs:
        assert [other.num_queued for other in asyncio.run(ask())] == [7]


def test_a_front_whose_event_loop_hangs_gives_no_answer_until_it_goes_on() -> None:
    parent, theirs = socket.socketpair()
    parent.setblocking(False)

    async def hang() -> None:
        link = ParentLink(theirs)
        peers = LinkedPeers(link, SharedCounts(1, 0))
        peers.answer_with(lambda: FrontReport(num_queued=3))
        thread = Thread(target=link.on_ask)  # as the link's thread does when the parent asks
        thread.start()
        thread.join()  # and the loop hangs meanwhile
        with pytest.raises(BlockingIOError):
            parent.recv(1 << 16)
        await asyncio.sleep(0)
        assert list(FrameReader(LINK).feed(parent.recv(1 << 16))) == [FrontReport(num_queued=3)]

    with parent, theirs:
        asyncio.run(hang())


def test_counts_are_shared_and_forgotten_by_front() -> None:
    memory = new_memory(2, 3)
    one, two = (SharedCounts(2, 3, front=front, descriptor=memory) for front in (0, 1))
    os.close(memory)
    for key in (0, 0, 2):
        one.enter(key)
    two.enter(0)
    assert [two.in_progress(key) for key in (0, 1, 2, None)] == [3, 0, 1, 4]
    one.leave(0)
    assert (one.in_progress(0), two.in_progress()) == (2, 3)
    two.forget(0)
    assert (one.in_progress(0), one.in_progress(2), two.in_progress()) == (1, 0, 1)


def test_a_system_without_nameless_memory_has_a_file_that_no_folder_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    memory = new_memory(2, 1)
    one, two = (SharedCounts(2, 1, front=front, descriptor=memory) for front in (0, 1))
    assert os.fstat(memory).st_nlink == 0
    os.close(memory)
    one.enter(0)
    assert two.in_progress() == 1


def test_sequences_are_counted_like_requests_and_forgotten_by_front() -> None:
    memory = new_memory(2, 2)
    one, two = (SharedCounts(2, 2, front=front, descriptor=memory) for front in (0, 1))
    os.close(memory)
    one.enter(0)
    one.enter_sequences(0, 30)
    two.enter_sequences(1, 5)
    assert [two.num_sequences(key) for key in (0, 1, None)] == [30, 5, 35]
    two.leave_sequences(1, 5)
    one.forget(0)
    assert (one.num_sequences(), one.in_progress()) == (0, 0)


def test_a_limit_that_one_key_has_filled_has_room_for_the_share_of_another() -> None:
    counts = SharedCounts(1, 3)
    counts.enter_sequences(0, 100)
    assert not counts.has_room_for_sequences(0, 1, 100)
    assert counts.has_room_for_sequences(1, 50, 100)
    assert not counts.has_room_for_sequences(1, 51, 100)
    counts.enter_sequences(1, 50)
    assert counts.has_room_for_sequences(2, 33, 100)
    assert not counts.has_room_for_sequences(2, 34, 100)
    for _ in range(4):
        counts.enter(0)
    assert [counts.has_room_for_request(key, 4) for key in (0, 1)] == [False, True]
    assert not SharedCounts(1, 0).has_room_for_sequences(-1, 101, 100), "without keys there is one share"


def test_starts_count_for_a_minute_in_whichever_front_they_were() -> None:
    memory = new_memory(2, 1)
    one, two = (SharedCounts(2, 1, front=front, descriptor=memory) for front in (0, 1))
    os.close(memory)
    for counts, at in ((one, 100.2), (two, 100.9), (one, 130.0)):
        counts.start(-1, at)
    assert one.started(-1, 130.0) == (3, 100)
    assert two.started(-1, 160.9) == (3, 100)
    assert two.started(-1, 161.0) == (1, 130)
    one.start(-1, 164.5)  # in the place of second 100
    assert one.started(-1, 164.6) == (2, 130)
    assert one.started(-1, 500.0) == (0, 500)


def test_samples_add_up_and_new_series_join() -> None:
    total: Samples = {"a": {("a_total", ()): 1.0}}
    add_samples(total, {"a": {("a_total", ()): 2.0, ("a_total", (("x", "y"),)): 5.0}, "b": {("b", ()): 3.0}})
    assert total == {"a": {("a_total", ()): 3.0, ("a_total", (("x", "y"),)): 5.0}, "b": {("b", ()): 3.0}}


def test_every_front_gives_the_trace_of_all(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    with served(tmp_path, *TWO, "--trace-dir", str(traces)) as server:
        first, second = server.pids("front_process")
        for front in (first, second):
            with only(server, front):
                server.complete("import os", 4)
        for front in (first, second):
            with only(server, front):
                events = checked(server.client.get("/v1/trace").json())
                assert len(slices(events, "request")) == 2
                assert len(slices(events, "step")) == 8
        (core,) = server.pids("core_process")
        os.kill(core, signal.SIGKILL)
        wait_for(lambda: traces.exists() and any(path.stat().st_size for path in traces.iterdir()))
        wait_for(lambda: server.client.get("/ready").status_code == 200)
        assert server.complete("import os", 4)[3] == "length"
        assert not slices(checked(server.client.get("/v1/trace").json()), "step")[4:]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    (path,) = traces.iterdir()
    assert len(slices(checked(json.loads(path.read_text())), "request")) == 2
