"""The embedded model calls the demonstration's tools by itself, and puts a sentence's facts into a schema.

Each kind of request is a handful of phrasings that its training never showed (`tools/tiny/tool_data.py`). A share has
to be right, for a model of 7 million parameters makes mistakes, and another training would make others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.cli.tools.demo import TOOLS
from tests.server.conftest import MODEL, Running

OFFER = {"tools": [tool.definition() for tool in TOOLS.values()], "tool_choice": "auto"}
SUMS = {
    "Please calculate 12 * 7.": 84, "Can you work out 305 - 48?": 257, "How much does 96 / 4 make?": 24,
    "Please calculate 18 plus 64.": 82, "Can you work out 9 times 31?": 279, "Take 17 from 60.": 43,
    "What do you get if you add 52 and 39?": 91, "Give me 20 percent of 350.": 70,
}  # fmt: skip
ZONES = {
    "Can you tell me the time in Tokyo?": "Asia/Tokyo", "What is the local time in Oslo?": "Europe/Oslo",
    "What hour is it in Cairo?": "Africa/Cairo", "What is the local time in Paris?": "Europe/Paris",
    "Can you tell me the time in Chicago?": "America/Chicago", "What hour is it in Sydney?": "Australia/Sydney",
}  # fmt: skip
ASK_PERSON, ASK_ORDER = " Give name, age and city as JSON.", " Give name, number and thing as JSON."
FACTS: dict[str, dict[str, Any]] = {
    f"In Paris lives Anna, who is 31.{ASK_PERSON}": {"name": "Anna", "age": 31, "city": "Paris"},
    f"I am Leo from Tokyo, 58 years old.{ASK_PERSON}": {"name": "Leo", "age": 58, "city": "Tokyo"},
    f"In Berlin lives Kate, who is 24.{ASK_PERSON}": {"name": "Kate", "age": 24, "city": "Berlin"},
    f"David wants 12 books.{ASK_ORDER}": {"name": "David", "number": 12, "thing": "books"},
    f"Please send Emma 250 lamps.{ASK_ORDER}": {"name": "Emma", "number": 250, "thing": "lamps"},
    f"Paul wants 48 chairs.{ASK_ORDER}": {"name": "Paul", "number": 48, "thing": "chairs"},
}
PLAIN = ["What is a KV cache?", "What is quire?", "How do I start the server?", "What does os.path.join do?"]


def message(server: Running, question: str, **given: Any) -> dict[str, Any]:
    """The greedy answer to a question."""
    messages = [{"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "repetition_penalty": 1.0, "max_tokens": 80}
    reply = server.post("/v1/chat/completions", **body, **given)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0]["message"])


def called(server: Running, question: str) -> tuple[str, dict[str, str]]:
    """The tool and the arguments of the only call; no name when there is none or are several."""
    calls = message(server, question, **OFFER).get("tool_calls") or []
    if len(calls) != 1:
        return "", {}
    function = calls[0]["function"]
    return function["name"], json.loads(function["arguments"])


def calculates(server: Running, question: str) -> bool:
    name, arguments = called(server, question)
    return name == "calculate" and float(TOOLS[name].run(arguments["expression"])) == SUMS[question]


def looks_at_the_clock(server: Running, question: str) -> bool:
    return called(server, question) == ("get_time", {"timezone": ZONES[question]})


def fills(server: Running, question: str) -> bool:
    wanted = FACTS[question]
    properties = {name: {"type": "integer" if isinstance(fact, int) else "string"} for name, fact in wanted.items()}
    schema = {"type": "object", "properties": properties, "required": list(wanted), "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "facts", "schema": schema, "strict": True}}
    return bool(json.loads(message(server, question, response_format=form)["content"]) == wanted)


def answers(server: Running, question: str) -> bool:
    return called(server, question) == ("", {})


@pytest.mark.parametrize(
    ("is_right", "questions"),
    [(calculates, SUMS), (looks_at_the_clock, ZONES), (fills, FACTS), (answers, PLAIN)],
)
def test_most_requests_in_unseen_phrasings_are_right(
    is_right: Callable[[Running, str], bool], questions: list[str], server: Running
) -> None:
    wrong = [question for question in questions if not is_right(server, question)]
    assert len(wrong) <= len(questions) // 3, wrong
