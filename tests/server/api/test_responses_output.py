"""Output items of /v1/responses, however the parts of an answer are cut."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from quire.message_formats.parts import CallArguments, CallStart, Part, Reasoning, Text
from quire.server.api.responses.output_items import OutputItems, merged
from quire.server.http.streaming import encode

KINDS = ("text", "reasoning", "call")


def drawn(draw: random.Random) -> list[tuple[Part, list[Any]]]:
    """The parts of an answer, each of one token, which is its own logprob."""
    parts: list[tuple[Part, list[Any]]] = []
    num_calls = 0
    for _ in range(draw.randrange(6)):
        kind = draw.choice(KINDS)
        if kind == "call":
            parts.append((CallStart(num_calls, f"call_{num_calls}", "weather"), []))
        for _ in range(draw.randrange(1, 5)):
            word = draw.choice(("a", "bc", "\n", "é"))
            if kind == "text":
                parts.append((Text(word), [word]))
            else:
                parts.append((Reasoning(word) if kind == "reasoning" else CallArguments(num_calls, word), []))
        num_calls += kind == "call"
    return parts


def told(pieces: list[list[tuple[Part, list[Any]]]], *, is_cut: bool) -> tuple[list[Any], list[tuple[str, Any]]]:
    """The items of an answer that comes in pieces, and all events."""
    output = OutputItems("x")
    events = []
    for piece in pieces:
        for part, logprobs in merged(piece):
            events += list(output.add(part, encode(logprobs)))
    events += list(output.finish(is_cut=is_cut))
    return json.loads(encode(output.items)), json.loads(encode([[kind, fields] for kind, fields in events]))


def cut(parts: list[Any], draw: random.Random) -> list[list[Any]]:
    places = sorted(draw.randrange(len(parts) + 1) for _ in range(draw.randrange(5)))
    return [parts[begin:end] for begin, end in zip([0, *places], [*places, len(parts)], strict=True)]


def test_however_it_is_cut_the_output_is_the_same() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        parts, is_cut = drawn(draw), draw.random() < 0.5
        whole, _ = told([parts], is_cut=is_cut)
        again, events = told(cut(parts, draw), is_cut=is_cut)
        assert again == whole
        assert whole[-1]["status"] == ("incomplete" if is_cut else "completed")
        assert [fields["item"] for kind, fields in events if kind == "response.output_item.done"] == whole
        for index, item in enumerate(whole):
            mine = [fields for _, fields in events if fields.get("output_index") == index]
            text = "".join(fields["delta"] for fields in mine if "delta" in fields)
            assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
            if item["type"] == "message":
                logprobs = [one for fields in mine if "delta" in fields for one in fields["logprobs"]]
                assert logprobs == item["content"][0]["logprobs"]
                assert "".join(logprobs) == text


def test_logprobs_without_text_are_told_at_the_end() -> None:
    output = OutputItems("x")
    list(output.add(Text("a"), b"[1]"))
    events = list(output.finish(is_cut=False, logprobs=b"[2,3]"))
    assert events[0][1]["delta"] == ""
    assert msgspec.json.decode(encode(output.items[0]))["content"][0]["logprobs"] == [1, 2, 3]
