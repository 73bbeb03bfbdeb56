"""From what a format's reader finds to the parts of a message: text without the space around markers, checked calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from quire.message_formats.marks import Marks
from quire.message_formats.parts import CallArguments, CallStart, Part, Reasoning, Text
from quire.message_formats.reader import SPACE, Malformed
from quire.utils.json_text import loads

MAX_NAME = 256
"""Characters of a function's name."""


class Trimmed:
    """Text, without the white space next to markers. Where text goes on behind a marker, that before it stays, or else
    that behind it."""

    def __init__(self, emit: Callable[[str], None], *, after_marker: bool) -> None:
        self._emit = emit
        self._held = ""
        self._is_after_marker = after_marker
        self._drops_space = after_marker
        self.is_blank = True
        """Nothing but white space has come."""

    def put(self, text: str) -> None:
        """The next piece."""
        if self._drops_space:
            text = text.lstrip(SPACE)
        text = self._held + text
        body = text.rstrip(SPACE)
        self._held = text[len(body) :]
        if body:
            self.is_blank = self._is_after_marker = self._drops_space = False
            self._emit(body)

    def marker(self) -> None:
        """A marker stands here."""
        if self.is_blank:
            self._held = ""
        self._is_after_marker = True
        self._drops_space = self.is_blank or bool(self._held)

    def end(self) -> None:
        """No more text comes."""
        if self._held and not self._is_after_marker:
            self._emit(self._held)
        self._held = ""


class CallWriter:
    """Calls as a reader finds them.

    A call is told when it is whole and its arguments are a JSON object; `as_they_come` tells it piece by piece, for
    calls that a grammar keeps well-formed.
    """

    def __init__(
        self,
        emit: Callable[[Part], None],
        marks: Marks,
        new_id: Callable[[int], str],
        *,
        on_told: Callable[[], None],
        as_they_come: bool,
    ) -> None:
        """`on_told` is called when all that was read so far has been told."""
        self.num_calls = 0
        self.is_last_cut = False
        """The last call that was told ends before its arguments do."""
        self._on_told = on_told
        self._emit = emit
        self._marks = marks
        self._new_id = new_id
        self._as_they_come = as_they_come
        self._name = ""
        self._id = ""
        self._ids: set[str] = set()
        """Those that the model wrote: what it writes again is no id."""
        self._pieces: list[str] = []
        self._is_told = False

    def begin(self) -> None:
        """A call begins, of which nothing is known yet."""
        self._name = self._id = ""
        self._pieces = []
        self._is_told = False

    def name(self, name: str, call_id: str = "") -> None:
        """The function's name, and an id if the model wrote one. Raises: Malformed for what is no name."""
        name = self._marks.spell(name)
        if not name or len(name) > MAX_NAME or self._name or _NO_NAME.search(name):
            raise Malformed
        self._name, self._id = name, call_id
        if self._as_they_come:
            self._start()

    def arguments(self, text: str) -> None:
        """The next piece of the arguments."""
        text = self._marks.spell(text)
        self._pieces.append(text)
        if self._is_told:
            self._emit(CallArguments(self.num_calls, text))
            self._on_told()

    def end(self) -> None:
        """The call is whole. Raises: Malformed when it is none."""
        if not self._name:
            raise Malformed
        whole = "".join(self._pieces)
        if not self._is_told:
            whole = checked_arguments(whole)
            self._start()
            self._emit(CallArguments(self.num_calls, whole))
        elif not whole:
            self._emit(CallArguments(self.num_calls, "{}"))
        self.num_calls += 1
        self._is_told = False
        self._on_told()

    def cut(self) -> bool:
        """A call does not go on as one. Whether some of it was told: then it counts."""
        was_told, self._is_told = self._is_told, False
        self.num_calls += was_told
        self.is_last_cut = was_told and not _is_json("".join(self._pieces))
        return was_told

    def _start(self) -> None:
        self._is_told = True
        self.is_last_cut = False
        self._on_told()
        call_id = self._id if self._id and self._id not in self._ids else self._new_id(self.num_calls)
        self._ids.add(call_id)
        self._emit(CallStart(self.num_calls, call_id, self._name))
        for piece in self._pieces if self._as_they_come else ():  # they stood before the name
            self._emit(CallArguments(self.num_calls, piece))


_NO_NAME = re.compile(f"[{SPACE}\ud800-\udfff]")


class MessageWriter:
    """The parts of a message: marked text and thinking as they stand, and calls."""

    def __init__(self, emit: Callable[[Part], None], marks: Marks, calls: CallWriter | None) -> None:
        """`calls` is None where the request allows no calls."""
        self.calls = calls
        self.is_thinking = False
        """The message is inside its thinking."""
        self._emit = emit
        self._marks = marks

    def text(self, text: str) -> None:
        """The next piece of the answer."""
        self._emit(Text(self._marks.spell(text)))

    def reasoning(self, text: str) -> None:
        """The next piece of the thinking."""
        self._emit(Reasoning(self._marks.spell(text)))


def checked_arguments(text: str) -> str:
    """Arguments as a JSON object in a text; those that are one inside a JSON string come out of it. Nothing and null
    are no arguments.

    Raises: Malformed.
    """
    value = _parsed(text)
    if isinstance(value, str):
        text, value = value, _parsed(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text if _is_json(text) else _dumped(value)


def _parsed(text: str) -> Any:
    if not text.strip(SPACE):
        return None
    try:
        return loads(text, strict=False)
    except (ValueError, RecursionError):
        raise Malformed from None


def _is_json(text: str) -> bool:
    """Whether a text that `_parsed` takes is JSON to the letter: without line breaks inside strings, which models
    write, and without lone surrogates."""
    try:
        text.encode()
        json.loads(text)
    except ValueError:
        return False
    return True


def _dumped(value: dict[str, Any]) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_json(text) else json.dumps(value)
    except ValueError:  # a number that JSON has no spelling for
        raise Malformed from None
