"""Values of Python in a text, read as JSON while they come: models write calls as Python does. Nothing is evaluated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from quire.message_formats.reader import MAX_DEPTH, Malformed, Reader, Steps

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
        for _ in literal(reader, pieces.append):
            pass  # a closed reader waits for nothing
        for _ in reader.spaces():
            pass
    except Malformed:
        return None
    return None if reader.num_left else "".join(pieces)


def literal(reader: Reader, tell: Tell, depth: int = 0) -> Steps[None]:
    """One value: a text, a number, True, False, None, or a list, a tuple or a dict of such.

    Raises: Malformed.
    """
    if depth > MAX_DEPTH:
        raise Malformed
    yield from reader.spaces()
    match (yield from reader.peek()):
        case "'" | '"':
            yield from _text(reader, tell)
        case "[":
            reader.skip(1)
            tell("[")
            yield from _items(reader, tell, "]", depth)
            tell("]")
        case "(":
            reader.skip(1)
            yield from _tuple(reader, tell, depth)
        case "{":
            reader.skip(1)
            yield from _dict(reader, tell, depth)
        case _:
            tell(_atom((yield from reader.matching(_ATOM))))


def _atom(text: str) -> str:
    if text in NAMES:
        return NAMES[text]
    if not _NUMBER.fullmatch(text):
        raise Malformed
    text = text.replace("_", "").removeprefix("+")
    if re.fullmatch("-?[0-9]+", text):
        return text
    number = float(text)
    if not math.isfinite(number):
        raise Malformed
    return json.dumps(number)


def _items(reader: Reader, tell: Tell, end: str, depth: int) -> Steps[tuple[int, bool]]:
    """How many items there are, and whether a comma follows the last one."""
    count, is_open = 0, False
    while True:
        yield from reader.spaces()
        if (count == 0 or is_open) and (yield from reader.accept(end)):
            return count, is_open
        if count:
            tell(", ")
        yield from literal(reader, tell, depth + 1)
        count += 1
        yield from reader.spaces()
        is_open = yield from reader.accept(",")
        if not is_open:
            yield from reader.expect(end)
            return count, False


def _tuple(reader: Reader, tell: Tell, depth: int) -> Steps[None]:
    pieces: list[str] = []
    count, has_comma = yield from _items(reader, pieces.append, ")", depth)
    inner = "".join(pieces)
    tell(inner if count == 1 and not has_comma else f"[{inner}]")


def _dict(reader: Reader, tell: Tell, depth: int) -> Steps[None]:
    tell("{")
    is_first = True
    while True:
        yield from reader.spaces()
        if (yield from reader.accept("}")):
            break
        tell("" if is_first else ", ")
        is_first = False
        yield from _key(reader, tell, depth)
        yield from reader.spaces()
        yield from reader.expect(":")
        tell(": ")
        yield from literal(reader, tell, depth + 1)
        yield from reader.spaces()
        if not (yield from reader.accept(",")):
            yield from reader.expect("}")
            break
    tell("}")


def _key(reader: Reader, tell: Tell, depth: int) -> Steps[None]:
    pieces: list[str] = []
    yield from literal(reader, pieces.append, depth + 1)
    key = "".join(pieces)
    if key[0] in "[{":
        raise Malformed
    tell(key if key[0] == '"' else f'"{key}"')


def _text(reader: Reader, tell: Tell) -> Steps[None]:
    ahead = yield from reader.peek(3)
    end = ahead if ahead in ("'''", '"""') else ahead[0]
    reader.skip(len(end))
    tell('"')
    while True:
        marker = yield from reader.until((end, "\\"), lambda text: tell(quoted(text)))
        if marker is None:
            raise Malformed
        if marker == end:
            tell('"')
            return
        tell((yield from _escape(reader)))


def _escape(reader: Reader) -> Steps[str]:
    """What stands behind a backslash, in JSON."""
    letter = yield from reader.peek()
    if not letter:
        raise Malformed
    digits = (yield from reader.peek(1 + _CODES[letter]))[1:] if letter in _CODES else ""
    if digits and len(digits) == _CODES[letter] and re.fullmatch("[0-9a-fA-F]*", digits):
        reader.skip(1 + len(digits))
        return _code(int(digits, 16))
    if letter in _ESCAPES:
        reader.skip(1)
        return _ESCAPES[letter]
    return r"\\"  # a backslash that begins nothing, as in Python


def _code(code: int) -> str:
    if code > 0x10FFFF:
        raise Malformed
    return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code))
