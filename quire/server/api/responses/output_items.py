"""The items of a response, made from the parts of an answer as they come, and the events that tell of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.message_formats.parts import CallArguments, CallStart, Part, Reasoning, Text

Event = tuple[str, dict[str, Any]]
"""An event's type and its fields."""
MESSAGE, REASONING, CALL = "message", "reasoning", "function_call"
_PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc"}
_CONTENT = {MESSAGE: "output_text", REASONING: "reasoning_text"}
"""The type of an item's content part."""


@dataclass(slots=True)
class _Open:
    """The item to which parts are added."""

    index: int
    id: str
    kind: str
    start: CallStart | None = None
    """Of a call."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All that was added so far."""
        return "".join(self.pieces)

    @property
    def place(self) -> dict[str, Any]:
        """Where events say that they belong."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == CALL else {**place, "content_index": 0}

    def item(self, status: str) -> dict[str, Any]:
        """The item; while it is in progress it is told without its content."""
        has_content = status != "in_progress"
        head = {"type": self.kind, "id": self.id, "status": status}
        if self.start is not None:
            arguments = self.text if has_content else ""
            return {**head, "call_id": self.start.id, "name": self.start.name, "arguments": arguments}
        content = [self.part()] if has_content else []
        if self.kind == REASONING:
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        """The content part of an item with text."""
        part: dict[str, Any] = {"type": _CONTENT[self.kind], "text": self.text}
        return {**part, "annotations": [], "logprobs": joined_lists(self.logprobs)} if self.kind == MESSAGE else part


def joined_lists(lists: Iterable[bytes]) -> msgspec.Raw:
    """One JSON array of the items of several; what was encoded is not encoded again."""
    return msgspec.Raw(b"[" + b",".join(inner for one in lists if (inner := one[1:-1])) + b"]")


class OutputItems:
    """The output of one response."""

    def __init__(self, owner_id: str) -> None:
        """`owner_id` is part of the items' ids."""
        self.items: list[dict[str, Any]] = []
        """Those that are whole."""
        self._owner_id = owner_id
        self._open: _Open | None = None

    def add(self, part: Part, logprobs: bytes = b"[]") -> Iterator[Event]:
        """The next part; `logprobs` is a JSON array of those of a text's tokens."""
        match part:
            case Text():
                yield from self._add_text(MESSAGE, part.text, logprobs)
            case Reasoning():
                yield from self._add_text(REASONING, part.text, logprobs)
            case CallStart():
                yield from self._begin(CALL, part)
            case CallArguments():
                assert self._open is not None
                self._open.pieces.append(part.text)
                yield "response.function_call_arguments.delta", {**self._open.place, "delta": part.text}

    def finish(self, *, is_cut: bool, logprobs: bytes = b"[]") -> Iterator[Event]:
        """No more parts come. An answer without any is a message without text. `logprobs` are those of tokens that
        have no text, at the end."""
        if self._open is None or (self._open.kind == MESSAGE and logprobs != b"[]"):
            yield from self._add_text(MESSAGE, "", logprobs)
        yield from self._end("incomplete" if is_cut else "completed")

    def _add_text(self, kind: str, text: str, logprobs: bytes) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        item = self._open
        assert item is not None
        item.pieces.append(text)
        fields: dict[str, Any] = {**item.place, "delta": text}
        if kind == MESSAGE:
            item.logprobs.append(logprobs)
            fields["logprobs"] = msgspec.Raw(logprobs)
        if text or logprobs != b"[]":
            yield f"response.{_CONTENT[kind]}.delta", fields

    def _begin(self, kind: str, start: CallStart | None = None) -> Iterator[Event]:
        yield from self._end("completed")
        index = len(self.items)
        item = self._open = _Open(index, f"{_PREFIXES[kind]}_{self._owner_id}_{index}", kind, start)
        yield "response.output_item.added", {"output_index": index, "item": item.item("in_progress")}
        if kind != CALL:
            yield "response.content_part.added", {**item.place, "part": item.part()}

    def _end(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        self._open = None
        whole = item.item(status)
        self.items.append(whole)
        if item.start is not None:
            fields = {**item.place, "name": item.start.name, "arguments": whole["arguments"]}
            yield "response.function_call_arguments.done", fields
        else:
            (part,) = whole["content"]
            yield (
                f"response.{part['type']}.done",
                {**item.place, **{k: part[k] for k in ("text", "logprobs") if k in part}},
            )
            yield "response.content_part.done", {**item.place, "part": part}
        yield "response.output_item.done", {"output_index": item.index, "item": whole}


def merged(parts: Iterable[tuple[Part, list[Any]]]) -> Iterator[tuple[Part, list[Any]]]:
    """The same parts, neighbours of one kind as one, each with the logprobs of all its tokens."""
    for _, group in itertools.groupby(parts, lambda pair: _kind_of(pair[0])):
        pairs = list(group)
        first, logprobs = pairs[0][0], [entry for _, entries in pairs for entry in entries]
        if isinstance(first, CallStart):
            yield first, logprobs
            continue
        text = "".join(part.text for part, _ in pairs if not isinstance(part, CallStart))
        yield (CallArguments(first.index, text) if isinstance(first, CallArguments) else type(first)(text)), logprobs


def _kind_of(part: Part) -> tuple[type, int]:
    return type(part), part.index if isinstance(part, (CallStart, CallArguments)) else 0
