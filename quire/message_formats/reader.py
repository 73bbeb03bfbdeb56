"""`Reader`: marked text that comes in pieces, read by generators that wait for more where they need it.

A generator yields when what it has does not decide how to go on. So what is read never depends on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of the reading; yields to wait for more text."""
SPACE = " \t\r\n"
MAX_DEPTH = 128
"""Of JSON inside JSON."""


class Malformed(Exception):
    """The text does not have the form that its beginning promised."""


class Reader:
    """The text so far, and how much of it was read."""

    def __init__(self) -> None:
        self.is_closed = False
        """No more text comes."""
        self.is_cut = False
        """The output was cut where markers may stand: the beginning of one at its end counts as that marker."""
        self._text = ""
        self._at = 0
        self._kept: list[str] | None = None
        """What was read and is remembered, but for what is still in the text."""
        self._kept_from = 0

    def feed(self, text: str) -> None:
        """Add text."""
        if self._kept is not None:
            self._kept.append(self._text[self._kept_from : self._at])
        self._text = self._text[self._at :] + text
        self._at = self._kept_from = 0

    @property
    def num_left(self) -> int:
        """Characters that are there and were not read."""
        return len(self._text) - self._at

    @property
    def is_cut_here(self) -> bool:
        """The output was cut, and all of it was read."""
        return self.is_cut and not self.num_left

    def keep(self) -> None:
        """Remember what is read from here on."""
        self._kept = []
        self._kept_from = self._at

    def kept(self) -> str:
        """What was read since `keep`."""
        return "".join([*(self._kept or ()), self._text[self._kept_from : self._at]])

    def forget(self) -> None:
        """Remember what is read no longer."""
        self._kept = None

    def skip(self, count: int) -> None:
        """Read characters that are there."""
        self._at += count

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters, fewer at the end; none of them is read."""
        while len(self._text) - self._at < count and not self.is_closed:
            yield
        return self._text[self._at : self._at + count]

    def unread(self, text: str) -> None:
        """Go back before the text that was just read. If it came in pieces, it must have been kept."""
        while self._at < len(text):
            assert self._kept
            piece = self._kept.pop()
            self._text = piece + self._text
            self._at += len(piece)
        self._at -= len(text)

    def spaces(self) -> Steps[str]:
        """White space."""
        if self._at < len(self._text) and self._text[self._at] not in SPACE:
            return ""  # as mostly
        return (yield from self.matching(_SPACES))

    def after_spaces(self) -> Steps[str]:
        """The first character behind white space, or nothing at the end. Reads neither; both must be kept."""
        spaces = yield from self.spaces()
        following = yield from self.peek()
        self.unread(spaces)
        return following

    def matching(self, pattern: re.Pattern[str], on_piece: Callable[[str], None] | None = None) -> Steps[str]:
        """Characters as long as the pattern, a repeated class, takes them. Each piece is told as it comes."""
        pieces = []
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            if match[0]:
                self._at = match.end()
                pieces.append(match[0])
                if on_piece is not None:
                    on_piece(match[0])
            if self._at < len(self._text) or self.is_closed:
                return "".join(pieces)
            yield

    def accept(self, literal: str) -> Steps[bool]:
        """Read a literal, if it comes next. Waits only while it may."""
        return (yield from self.accepted(literal)) is not None

    def comes(self, literal: str) -> Steps[bool]:
        """Whether `accept` would read a literal. Reads nothing."""
        read = yield from self.accepted(literal)
        self.unread(read or "")
        return read is not None

    def accepted(self, literal: str) -> Steps[str | None]:
        """What `accept` has read: the literal, or as much as comes of it before a cut. None: it does not come."""
        while True:
            have = self._text[self._at : self._at + len(literal)]
            is_begun = self.is_cut and self.is_closed and bool(have) and literal.startswith(have)
            if have == literal or is_begun:
                self._at += len(have)
                return have
            if not literal.startswith(have) or self.is_closed:
                return None
            yield

    def accept_after_spaces(self, literal: str) -> Steps[bool]:
        """Read white space and a literal, if it comes next; or else neither. They must be kept."""
        spaces = yield from self.spaces()
        if (yield from self.accept(literal)):
            return True
        self.unread(spaces)
        return False

    def expect(self, literal: str) -> Steps[None]:
        """Read a literal. Raises: Malformed when another text comes."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def until(
        self, markers: tuple[str, ...], on_text: Callable[[str], None], *, others: tuple[str, ...] = ()
    ) -> Steps[str | None]:
        """Tell all text before the first marker, as it comes, and read the marker. None: it never came.

        Where the output was cut, the beginning of a marker at its end, or of one of `others`, is no text.
        """
        pattern = _first_of(markers)
        while True:
            match = pattern.search(self._text, self._at) if markers else None
            end = match.start() if match else len(self._text) - self._num_open((*markers, *others))
            if end > self._at:
                piece = self._text[self._at : end]
                self._at = end  # before it is told: what was told is not kept
                on_text(piece)
            if match:
                self._at = match.end()
                return match[0]
            if self.is_closed:
                self._at = len(self._text)
                return None
            yield

    def _num_open(self, markers: tuple[str, ...]) -> int:
        """Characters at the end that may be the beginning of a marker."""
        if self.is_closed and not self.is_cut:
            return 0
        beginnings, longest = _beginnings_of(markers)
        end = len(self._text)
        for start in range(max(self._at, end - longest), end):
            if self._text[start:] in beginnings:
                return end - start
        return 0

    def within(self, markers: tuple[str, ...]) -> Steps[tuple[str, str]]:
        """The text up to the first marker, and the marker. Raises: Malformed when none comes."""
        pieces: list[str] = []
        marker = yield from self.until(markers, pieces.append)
        if marker is None:
            raise Malformed
        return "".join(pieces), marker

    def json(self, on_piece: Callable[[str], None]) -> Steps[None]:
        """One JSON value, told as it comes. Only its extent is found out: brackets, strings, the end of a number.

        Raises: Malformed where a value cannot go on, or does not end.
        """
        yield from self.spaces()
        if (yield from self.peek()) not in ("{", "[", '"'):
            if not (yield from self.matching(_ATOM, on_piece)):
                raise Malformed
            return
        depth = 0
        while True:
            character = yield from self.peek()
            if character == '"':
                yield from self._string(on_piece)
            elif character and character in "[{" and depth < MAX_DEPTH:
                depth += 1
                self._one(on_piece)
            elif character and character in "]}":
                depth -= 1
                self._one(on_piece)
            else:
                raise Malformed
            if depth == 0:
                return
            yield from self.matching(_BETWEEN, on_piece)

    def _one(self, on_piece: Callable[[str], None]) -> None:
        self._at += 1
        on_piece(self._text[self._at - 1])

    def _string(self, on_piece: Callable[[str], None]) -> Steps[None]:
        self._one(on_piece)
        while True:
            yield from self.matching(_STRING, on_piece)
            following = yield from self.peek()
            if following == '"':
                self._one(on_piece)
                return
            pair = yield from self.peek(2)
            self._at += len(pair)
            if len(pair) < 2:  # the end cuts an escape, which is part of what was begun
                raise Malformed
            on_piece(pair)


_SPACES = re.compile(f"[{SPACE}]*")
_ATOM = re.compile(r"[-+.0-9A-Za-z]*")
_BETWEEN = re.compile(f"[-+.0-9A-Za-z,:{SPACE}]*")
"""What stands between brackets and strings."""
_STRING = re.compile(r'[^"\\]*')


@lru_cache(maxsize=256)
def _first_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


@lru_cache(maxsize=256)
def _beginnings_of(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """How the markers begin, and how long the longest is before its last character."""
    beginnings = frozenset(marker[:size] for marker in markers for size in range(1, len(marker) + 1))
    return beginnings, max(map(len, markers), default=1) - 1
