"""`x-quire-why: 1`: the times add up, and name what a request waited for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.engine.front.why import NAMES
from tests.server.conftest import Running

ASK = {"x-quire-why": "1"}
TIMES = ("front_s", *NAMES.values(), "delivery_s")


def why(server: Running, path: str = "/v1/completions", **body: Any) -> list[Any]:
    reply = server.client.post(path, json=body, headers=ASK)
    if not body.get("stream"):
        found = reply.json()["why"]
    else:
        lines = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        (found,) = [line["why"] for line in lines if "why" in line]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_times_add_up_and_tokens_are_counted(server: Running, stream: bool) -> None:
    shared = [71 + stream] * 64
    server.client.post("/v1/completions", json={"prompt": shared, "max_tokens": 1})
    (facts,) = why(server, prompt=[*shared, *[9] * 20], max_tokens=9, ignore_eos=True, n=2, stream=stream)
    assert sum(facts[name] for name in TIMES) == pytest.approx(facts["total_s"], abs=1e-4)
    assert all(facts[name] >= 0 for name in TIMES)
    assert (facts["prompt_tokens"], facts["cached_tokens"], facts["computed_tokens"]) == (84, 64, 20)
    assert (facts["output_tokens"], facts["prefill_steps"], facts["decode_steps"]) == (18, 1, 8)
    assert (facts["preemptions"], facts["replays"], facts["bound_by"]) == (0, 0, None)
    assert [span["phase"] for span in facts["timeline"]] == ["queued", "prefill", "decode"]
    assert facts["timeline"][1]["tokens"] == 20
    assert facts["timeline_left_out"] == 0
    assert facts["held_s"] == {"next step": facts["queue_s"]}


def test_each_prompt_has_its_own_answer(server: Running) -> None:
    assert [facts["prompt_tokens"] for facts in why(server, prompt=[[5], [5, 6, 7]], max_tokens=2)] == [1, 3]


def test_nobody_is_told_unasked(server: Running) -> None:
    assert "why" not in server.post("/v1/completions", prompt="a", max_tokens=1).json()
