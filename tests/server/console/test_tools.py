"""The console's tools: the same as those of `quire chat --tools demo`; a call on the page from request to answer."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from quire.cli.tools.demo import TOOLS, get_time, run_tool
from tests.server.conftest import Running
from tests.server.console.conftest import in_node, kept, say, set_to, stream_of


def run_in_node(*calls: tuple[str, str]) -> list[str]:
    return in_node(f"console.log(JSON.stringify({json.dumps(calls)}.map((call) => tools.runTool(...call))));")  # type: ignore[no-any-return]


def test_the_page_offers_what_the_command_offers() -> None:
    offered = in_node("console.log(JSON.stringify(tools.DEFINITIONS));")
    assert offered == [tool.definition() for tool in TOOLS.values()]


def test_the_page_calculates_as_the_command_does() -> None:
    sums = ["12 * 7", "(3 + 4) * 5", "7 / 2", "7 // 2", "-7 // 2", "-7 % 3", "7 % -3", "2 ** 10", "2 ** -2", "-2 ** 2"]
    sums += ["2 ** 3 ** 2", "0.1 + 0.2", "1 / 3", "1e3 + .5", "+-+5", "((((1))))", "1 / 0", "0 ** -1", "", "12 *"]
    sums += ["x + 1", "2 3", "(1", "1)", "9 ** 9 ** 9", "(-8) ** 0.5", "alert(1)", "2 ^ 3", "1" * 201]
    calls = [("calculate", json.dumps({"expression": text})) for text in sums]
    for call, result in zip(calls, run_in_node(*calls), strict=True):
        expected = run_tool(*call)
        assert result.startswith("error: ") if expected.startswith("error: ") else result == expected, (call, result)


def test_the_page_tells_the_time_as_the_command_does() -> None:
    zones = ["UTC", "Asia/Tokyo", "Pacific/Auckland", "America/New_York"]
    moments = {datetime.datetime.now(datetime.UTC)}
    calls = [("get_time", json.dumps({"timezone": zone})) for zone in zones]
    results = run_in_node(*calls)
    moments.add(datetime.datetime.now(datetime.UTC))
    assert any(results == [get_time(zone, moment) for zone in zones] for moment in moments)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("weather", "{}", "there is no tool weather; there are calculate, get_time"),
        ("toString", "{}", "there is no tool toString"),
        ("calculate", '{"expression": ', "the arguments must look like"),
        ("calculate", "[]", "the arguments must look like"),
        ("calculate", '{"expression": "1", "more": 2}', "the arguments must look like"),
        ("get_time", '{"timezone": "Nowhere"}', "there is no time zone Nowhere"),
        ("get_time", json.dumps({"timezone": "x" * 999}), "999 characters, 200 are allowed"),
    ],
)
def test_mistakes_are_told_to_the_model(name: str, arguments: str, told: str) -> None:
    (result,) = run_in_node((name, arguments))
    assert result.startswith("error: ")
    assert told in result


def test_calls_go_back_with_their_results() -> None:
    body = in_node(
        """
        const call = {id: "1", name: "calculate", arguments: "{", result: "error: no"};
        const path = [{role: "user", text: "a"}, {role: "assistant", text: "", toolCalls: [call]}];
        console.log(JSON.stringify(request.chatBody("m", {tools: true}, path)));
        """
    )
    _, said, result = body["messages"]
    assert said["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "calculate", "arguments": "{}"}}]
    assert result == {"role": "tool", "tool_call_id": "1", "content": "error: no"}
    assert body["tool_choice"] == "auto"


def scripted(page: Any, *replies: str) -> list[dict[str, Any]]:
    """Let chats be answered with these in turn, the last one for ever; the requests."""
    requests: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        requests.append(route.request.post_data_json)
        body = replies[min(len(requests), len(replies)) - 1]
        route.fulfill(content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", answer)
    return requests


CALL = {"index": 0, "id": "a", "function": {"name": "calculate", "arguments": '{"expression": "12 * 7"}'}}


def test_a_call_is_shown_from_request_to_answer(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, tools=True)
    requests = scripted(page, stream_of({"tool_calls": [CALL]}), stream_of({"content": "12 * 7 = 84."}))
    say(page, "What is 12 times 7?", 2)
    card = page.locator(".tool").text_content()
    assert "Calls calculate" in card
    assert '"expression": "12 * 7"' in card
    assert "Result 84" in card
    assert page.locator(".output").last.text_content().strip() == "12 * 7 = 84."
    assert [request["tools"][0]["function"]["name"] for request in requests] == ["calculate"] * 2
    assert [message["role"] for message in requests[1]["messages"]] == ["user", "assistant", "tool"]
    page.reload()
    assert "Result 84" in page.locator(".tool").text_content()
    set_to(page, tools=False)
    say(page, "Thanks", 3)
    assert "tools" not in requests[-1]
    assert len(requests[-1]["messages"]) == 5


def test_endless_calls_end(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, tools=True)
    requests = scripted(page, stream_of({"tool_calls": [CALL]}))
    say(page, "What is 12 times 7?", 5)
    page.locator("#send:visible").wait_for()
    assert [request["tool_choice"] for request in requests] == ["auto"] * 4 + ["none"]


def test_a_model_that_calls_nothing_answers_as_ever(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, tools=True, temperature=0)
    say(page, "What is a KV cache?")
    assert page.locator(".tool").count() == 0
    (conversation,) = kept(page)
    assert "cache" in conversation["messages"][-1]["text"]
    server.wait_idle()
