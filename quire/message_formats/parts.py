"""What a message consists of, in the pieces in which it comes, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    """Calls of a message count from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are a JSON object in the end, unless the output was cut."""

    index: int
    text: str


Part = Text | Reasoning | CallStart | CallArguments


@dataclass(slots=True)
class ToolCall:
    """A call, whole."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A message, whole: the parts that were streamed, put together."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Message:
        """The message that parts add up to."""
        message = cls()
        text: list[str] = []
        reasoning: list[str] = []
        arguments: dict[int, list[str]] = {}
        for part in parts:
            match part:
                case Text():
                    text.append(part.text)
                case Reasoning():
                    reasoning.append(part.text)
                case CallStart():
                    message.tool_calls.append(ToolCall(part.id, part.name))
                    arguments[part.index] = []
                case CallArguments():
                    arguments[part.index].append(part.text)
        message.text, message.reasoning = "".join(text), "".join(reasoning)
        for call, pieces in zip(message.tool_calls, arguments.values(), strict=True):
            call.arguments = "".join(pieces)
        return message


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same parts, neighbours of one kind as one."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        match part, last:
            case Text(), Text():
                merged[-1] = Text(last.text + part.text)
            case Reasoning(), Reasoning():
                merged[-1] = Reasoning(last.text + part.text)
            case CallArguments(), CallArguments() if last.index == part.index:
                merged[-1] = CallArguments(part.index, last.text + part.text)
            case _:
                merged.append(part)
    return merged
