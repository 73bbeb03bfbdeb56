"""What the live view reads: /v1/stats and /v1/capabilities."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.conftest import TIMEOUT, Running, stand_in, wait_for


def test_statistics_say_what_the_engine_did_in_between(server: Running) -> None:
    server.wait_idle()
    server.post("/v1/completions", prompt="a", max_tokens=1)
    before = server.client.get("/v1/stats").json()
    server.post("/v1/completions", prompt=[7] * 40, max_tokens=5, ignore_eos=True)
    server.wait_idle()
    after = server.client.get("/v1/stats").json()
    assert (after["state"], after["num_restarts"], after["num_requests"]) == ("ready", 0, 0)
    assert after["age_s"] >= 0
    names = ("num_generation_tokens", "num_first_tokens")
    assert [after["stats"][name] - before["stats"][name] for name in names] == [5, 1]


def test_statistics_are_told_while_every_place_is_taken(serve: Any) -> None:
    with serve(max_concurrent_requests=1) as small, stand_in(small) as held:
        body = {"prompt": "a", "max_tokens": 1}
        thread = threading.Thread(target=small.client.post, args=("/v1/completions",), kwargs={"json": body})
        thread.start()
        wait_for(lambda: small.engine.num_unfinished == 1)
        assert small.client.post("/v1/completions", json=body).status_code == 429
        assert small.client.get("/v1/stats").json()["num_requests"] == 1
        held.may_go.set()
        thread.join(TIMEOUT)


def test_capabilities_name_the_defaults_that_requests_get(server: Running) -> None:
    defaults = server.client.get("/v1/capabilities").json()["sampling_defaults"]
    ask = {"prompt": "import os", "max_tokens": 12, "seed": 7}
    plain, spelled = server.post("/v1/completions", **ask), server.post("/v1/completions", **ask, **defaults)
    assert plain.json()["choices"] == spelled.json()["choices"]


def ask(server: Running, stack: ExitStack, key: str = "", **body: Any) -> None:
    """Start a completion that runs until its connection is closed."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    given = {"prompt": "import os", "max_tokens": 900, "ignore_eos": True, "stream": True, **body}
    reply = stack.enter_context(server.client.stream("POST", "/v1/completions", json=given, headers=headers))
    assert reply.status_code == 200


def activity(server: Running, key: str = "") -> dict[str, Any]:
    """What a key's requests do, told after its last request has come to the engine."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    reply = server.client.get("/v1/stats", params={"activity": True}, headers=headers)
    return reply.json()["activity"]  # type: ignore[no-any-return]


def test_activity_is_told_to_those_who_ask(server: Running) -> None:
    assert "activity" not in server.client.get("/v1/stats").json()
    server.wait_idle()
    with ExitStack() as stack:
        ask(server, stack, n=2)
        wait_for(lambda: len((activity(server)["requests"] or [{"sequences": []}])[0]["sequences"]) == 2)
        told = activity(server)
        (request,) = told["requests"]
        assert (told["num_running"], told["num_waiting"], told["num_keys"]) == (2, 0, 1)
        assert re.fullmatch(r"[0-9a-f]{32}-0", request["id"]), "no prefix of a front, no suffix of the engine"
        assert (request["n"], request["max_tokens"]) == (2, 900)
        assert [seq["state"] for seq in request["sequences"]] == ["output", "output"]
        stages = request["queue_s"] + request["prefill_s"] + request["decode_s"]
        assert stages == pytest.approx(request["arrived_s"], abs=1e-5)
    server.wait_idle()
    wait_for(lambda: activity(server)["requests"] == [])


def test_a_key_sees_its_own_requests_and_only_the_number_of_others(serve: Any) -> None:
    with serve(api_key=("one", "two")) as guarded, ExitStack() as stack:
        ask(guarded, stack, "one", prompt=[7] * 33)
        ask(guarded, stack, "two", prompt=[7] * 44)
        for key, length in (("one", 33), ("two", 44)):
            wait_for(lambda key=key: activity(guarded, key)["num_running"] == 1)  # type: ignore[misc]
            told = activity(guarded, key)
            assert [request["prompt_tokens"] for request in told["requests"]] == [length]
            assert told["num_keys"] == 2
        assert guarded.client.get("/v1/stats?activity=true").status_code == 401


def test_statistics_do_not_wait_for_a_long_step_and_many_watchers_ask_the_core_once(
    server: Running, serve: Any
) -> None:
    server.wait_idle()
    core = server.parts.core
    calls: list[str] = []
    real = core.activity
    core.activity = lambda tenant: (calls.append(tenant), real(tenant))[1]  # type: ignore[method-assign]
    try:
        with serve() as server, ExitStack() as stack, stand_in(server) as held:
            pool = stack.enter_context(ThreadPoolExecutor(9))
            done = pool.submit(server.post, "/v1/completions", prompt="import os", max_tokens=2)
            wait_for(lambda: bool(core.scheduler.running))
            watchers = [pool.submit(server.client.get, "/v1/stats?activity=true") for _ in range(8)]
            replies = [watcher.result(TIMEOUT).json() for watcher in watchers]
            assert not done.done(), "all were answered while the step ran"
            assert [reply["activity"] for reply in replies] == [None] * 8, "nothing is known of this core yet"
            assert calls == []
            held.may_go.set()
            assert done.result(TIMEOUT).status_code == 200
            wait_for(lambda: bool(calls))
    finally:
        del core.activity
    assert len(calls) == 1, "one call for all of them, answered after the step"
