"""Tries a chat template, to find what of a conversation it leaves out without a word.

A template that drops the system prompt, or the results of tools, gives fluent answers to another question. Each probe
is a conversation in which one part holds a word of its own; the word must be in what is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quire.errors import RequestError
from quire.tokenizer.chat import REASONING_FIELDS, ChatTemplate

WORD = "qvxprobe"
EARLIER_REASONING = "thoughts of earlier answers"
LATEST_REASONING = "thoughts since the last user message"
REASONING_PARTS = frozenset({EARLIER_REASONING, LATEST_REASONING})
"""What many templates leave out on purpose."""
_USER = {"role": "user", "content": "a"}
_ASSISTANT = {"role": "assistant", "content": "b"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": f"{WORD}_call", "arguments": {"key": "c"}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "g"}
_TOOL = {
    "type": "function",
    "function": {
        "name": f"{WORD}_tool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "e"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Probe:
    """A part of conversations, and a conversation that has it."""

    part: str
    word: str
    """What must be rendered."""
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


PROBES = (
    Probe("system messages", WORD, [{"role": "system", "content": WORD}, _USER]),
    Probe("developer messages", WORD, [{"role": "developer", "content": WORD}, _USER]),
    Probe("earlier messages", WORD, [{"role": "user", "content": WORD}, _ASSISTANT, _USER]),
    Probe("earlier answers", WORD, [_USER, {"role": "assistant", "content": WORD}, _USER]),
    Probe("tools", f"{WORD}_tool", [_USER], [_TOOL]),
    Probe("earlier tool calls", f"{WORD}_call", [_USER, _CALLED, _RESULT], [_TOOL]),
    Probe("results of tools", f"{WORD}_result", [_USER, _CALLED, {**_RESULT, "content": f"{WORD}_result"}], [_TOOL]),
    Probe(EARLIER_REASONING, WORD, [_USER, {**_ASSISTANT, "reasoning_content": WORD}, _USER]),
    Probe(LATEST_REASONING, f"{WORD}_why", [_USER, {**_CALLED, "reasoning_content": f"{WORD}_why"}, _RESULT], [_TOOL]),
)


@lru_cache(maxsize=8)
def dropped_parts(template: ChatTemplate) -> frozenset[str]:
    """The parts of conversations that a template leaves out. What it refuses is not among them."""
    return frozenset(probe.part for probe in PROBES if _drops(template, probe))


def _drops(template: ChatTemplate, probe: Probe) -> bool:
    try:
        text = template.render(probe.messages, tools=probe.tools)
    except RequestError:
        return False
    return probe.word not in text


def parts_of(messages: Sequence[Mapping[str, Any]], *, has_tools: bool) -> frozenset[str]:
    """The parts that a conversation has, as far as `dropped_parts` knows them."""
    found = {"tools"} if has_tools else set()
    last_user = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    for index, message in enumerate(messages):
        if message.get("role") == "assistant" and any(message.get(name) for name in REASONING_FIELDS):
            found.add(EARLIER_REASONING if index < last_user else LATEST_REASONING)
        is_last = index == len(messages) - 1
        match message.get("role"):
            case "system":
                found.add("system messages")
            case "developer":
                found.add("developer messages")
            case "tool":
                found.add("results of tools")
            case "user" if not is_last:
                found.add("earlier messages")
            case "assistant" if not is_last:
                found.add("earlier tool calls" if message.get("tool_calls") else "earlier answers")
    return frozenset(found)
