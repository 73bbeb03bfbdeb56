"""Values of Python in a text, read as JSON while they come: models write calls as Python does. Nothing is evaluated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from quire.message_formats.reader import MAX_DEPTH, Malformed, Reader, Steps
from quire.utils.json_text import is_json

Tell = Callable[[str], None]
"""Takes the next piece of JSON."""
NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ATOM = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"[-+]?(?:[1-9][0-9_]*|0)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?|[-+]?\.[0-9]+(?:[eE][-+]?[0-9]+)?")
_ESCAPES = {"n": r"\n", "t": r"\t", "r": r"\r", "b": r"\b", "f": r"\f", "'": "'", '"': r"\"", "\\": r"\\", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
"""Digits behind these letters."""


def quoted(text: str) -> str:
    """A text as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_of_literal(text: str) -> str | None:
    """A text that is one value of Python, as JSON; None for any other text."""
    reader, pieces = Reader(), list[str]()
    reader.feed(text)
    reader.is_closed = True
    try:
        for _ in Literals(reader).read(pieces.append):
            pass  # a closed reader waits for nothing
        for _ in reader.spaces():
            pass
    except Malformed:
        return None
    return None if reader.num_left else "".join(pieces)


class Literals:
    """Reads values: texts, numbers, True, False, None, and lists, tuples and dicts of such."""

    def __init__(self, reader: Reader, stops: tuple[str, ...] = (), *, are_inside: bool = False) -> None:
        """`stops`: what no text holds. `are_inside`: something follows a value, so that at the end it may be cut."""
        self._reader = reader
        self._are_inside = are_inside
        self._stops = stops

    def read(self, tell: Tell, depth: int = 0) -> Steps[None]:
        """One value. Raises: Malformed."""
        if depth > MAX_DEPTH:
            raise Malformed
        yield from self._reader.spaces()
        match (yield from self._reader.peek()):
            case "'" | '"':
                yield from self._text(tell)
            case "[":
                self._reader.skip(1)
                tell("[")
                yield from self._items(tell, "]", depth)
                tell("]")
            case "(":
                self._reader.skip(1)
                yield from self._tuple(tell, depth)
            case "{":
                self._reader.skip(1)
                yield from self._dict(tell, depth)
            case _:
                atom = yield from self._reader.matching(_ATOM)
                if self._are_inside and not (yield from self._reader.peek()):
                    raise Malformed
                tell(_atom(atom, may_be_beyond=self._are_inside))

    def _items(self, tell: Tell, end: str, depth: int) -> Steps[tuple[int, bool]]:
        """How many items there are, and whether a comma follows the last one."""
        count, is_open = 0, False
        while True:
            yield from self._reader.spaces()
            if (count == 0 or is_open) and (yield from self._reader.accept(end)):
                return count, is_open
            if count:
                tell(", ")
            yield from self.read(tell, depth + 1)
            count += 1
            yield from self._reader.spaces()
            is_open = yield from self._reader.accept(",")
            if not is_open:
                yield from self._reader.expect(end)
                return count, False

    def _tuple(self, tell: Tell, depth: int) -> Steps[None]:
        pieces: list[str] = []
        count, has_comma = yield from self._items(pieces.append, ")", depth)
        inner = "".join(pieces)
        tell(inner if count == 1 and not has_comma else f"[{inner}]")

    def _dict(self, tell: Tell, depth: int) -> Steps[None]:
        tell("{")
        is_first = True
        while True:
            yield from self._reader.spaces()
            if (yield from self._reader.accept("}")):
                break
            tell("" if is_first else ", ")
            is_first = False
            yield from self._key(tell, depth)
            yield from self._reader.spaces()
            yield from self._reader.expect(":")
            tell(": ")
            yield from self.read(tell, depth + 1)
            yield from self._reader.spaces()
            if not (yield from self._reader.accept(",")):
                yield from self._reader.expect("}")
                break
        tell("}")

    def _key(self, tell: Tell, depth: int) -> Steps[None]:
        pieces: list[str] = []
        yield from self.read(pieces.append, depth + 1)
        key = "".join(pieces)
        if key[0] in "[{":
            raise Malformed
        tell(key if key[0] == '"' else f'"{key}"')

    def _text(self, tell: Tell) -> Steps[None]:
        ahead = yield from self._reader.peek(3)
        end = ahead if ahead in ("'''", '"""') else ahead[0]
        self._reader.skip(len(end))
        tell('"')
        while True:
            marker = yield from self._reader.until((end, "\\", *self._stops), lambda text: tell(quoted(text)))
            if marker is None or marker in self._stops:
                self._reader.unread(marker or "")
                raise Malformed
            if marker == end:
                tell('"')
                return
            tell((yield from _escape(self._reader)))


def _atom(text: str, *, may_be_beyond: bool) -> str:
    """One of the names, or a number. One that no float holds is left to whoever checks the whole."""
    if text in NAMES:
        return NAMES[text]
    if not _NUMBER.fullmatch(text):
        raise Malformed
    text = text.replace("_", "").removeprefix("+")
    if re.fullmatch("-?[0-9]+", text):
        return text
    number = float(text)
    if not (math.isfinite(number) or (may_be_beyond and is_json(text))):
        raise Malformed
    return json.dumps(number) if math.isfinite(number) else text


def _escape(reader: Reader) -> Steps[str]:
    """What stands behind a backslash, in JSON."""
    letter = yield from reader.peek()
    if not letter:
        raise Malformed
    digits = (yield from reader.peek(1 + _CODES[letter]))[1:] if letter in _CODES else ""
    if digits and len(digits) == _CODES[letter] and re.fullmatch("[0-9a-fA-F]*", digits):
        reader.skip(1 + len(digits))
        return _code(int(digits, 16))
    if letter in _CODES and len(digits) < _CODES[letter]:  # the output ends here
        reader.skip(1 + len(digits))
        raise Malformed
    if letter in _ESCAPES:
        reader.skip(1)
        return _ESCAPES[letter]
    return r"\\"  # a backslash that begins nothing, as in Python


def _code(code: int) -> str:
    if code > 0x10FFFF:
        raise Malformed
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code))
