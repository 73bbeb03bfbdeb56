"""`Cursor`: typed reads from the header of a GGUF file, none of which goes beyond the file or a limit.

The format: github.com/ggml-org/ggml, docs/gguf.md. All counts are Python integers, so no sum of them overflows.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping
from mmap import mmap
from types import MappingProxyType
from typing import NoReturn, TypeAlias

from quire.errors import counted, shown

MAX_HEADER_BYTES = 256 << 20
"""Metadata and tensor infos; the largest known tokenizers take 20 MB."""
MAX_TEXT_BYTES = 4 << 20
"""Of one text; chat templates have some 20 kB."""
MAX_VALUES = 2**22
"""Elements of all arrays together; a vocabulary of 262,144 tokens with scores, types and merges has 1.3 million."""
MAX_DEPTH = 4
"""Arrays within each other."""
TEXT, ARRAY, BOOL, FLOAT32 = 8, 9, 7, 6
NUMBERS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
)
"""Type of a value -> how the modules struct and array spell it."""

Scalar = int | float | str | bool
Value: TypeAlias = "Scalar | array[int] | array[float] | list[Value]"
"""Arrays of numbers are compact; arrays of texts, flags and arrays are lists."""


class HeaderProblem(Exception):
    """The header is damaged; the message says where and how."""


class HeaderContinues(HeaderProblem):
    """The header goes on behind the bytes of the file that are here."""


class Cursor:
    """A place in a file."""

    def __init__(self, data: mmap | bytes, file_bytes: int | None = None) -> None:
        """`file_bytes` is the size of the file, where only its first bytes are here."""
        self.data = data
        self.file_bytes = len(data) if file_bytes is None else file_bytes
        self.position = 0
        self.limit = min(len(data), MAX_HEADER_BYTES)
        self.num_values = 0
        """Elements of arrays so far."""

    def take(self, size: int, what: str) -> bytes:
        """The next bytes. Raises: HeaderProblem where the file, or what is read of it, ends before them."""
        end = self.position + size
        if end > self.limit:
            self._refuse_end(size, what)
        data = self.data[self.position : end]
        self.position = end
        return data

    def _refuse_end(self, size: int, what: str) -> None:
        where = f"{what} at byte {self.position} takes {counted(size, 'byte')}"
        if self.position + size > self.file_bytes:
            raise HeaderProblem(f"{where}, but the file ends at byte {self.file_bytes}")
        if self.position + size <= MAX_HEADER_BYTES:
            raise HeaderContinues(f"{where}, and {counted(len(self.data), 'byte')} of the file are here")
        raise HeaderProblem(f"{where}, but headers of more than {MAX_HEADER_BYTES} bytes are not read")

    def uint32(self, what: str) -> int:
        """An unsigned number of four bytes."""
        return int.from_bytes(self.take(4, what), "little")

    def uint64(self, what: str) -> int:
        """An unsigned number of eight bytes."""
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, *, most: int, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        number = self.uint64(what)
        if number > most:
            raise HeaderProblem(f"{what} is {number}, the limit is {most}")
        if number * least_bytes > self.file_bytes - self.position:
            rest = counted(self.file_bytes - self.position, "byte")
            raise HeaderProblem(f"{what} is {number}, which {rest} of the file have no room for")
        return number

    def text(self, what: str, most_bytes: int = MAX_TEXT_BYTES) -> str:
        """A length and so many bytes of UTF-8."""
        size = self.uint64(what)
        if size > most_bytes:
            raise HeaderProblem(f"{what} has {counted(size, 'byte')}, the limit is {most_bytes}")
        try:
            return self.take(size, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise HeaderProblem(f"{what}: byte {error.start} is not valid UTF-8") from None

    def value(self, what: str) -> Value:
        """A type and a value of it."""
        return self._value(self.uint32(f"the type of {what}"), what, 0)

    def _value(self, kind: int, what: str, depth: int) -> Value:
        if kind == TEXT:
            return self.text(what)
        if kind == ARRAY:
            return self._array(what, depth + 1)
        if kind == BOOL:
            return self._flag(what)
        if kind not in NUMBERS:
            raise HeaderProblem(f"{what} has the type {kind}, which is not known")
        form = f"<{NUMBERS[kind]}"
        (number,) = struct.unpack(form, self.take(struct.calcsize(form), what))
        assert isinstance(number, (int, float))
        return as_written(number) if kind == FLOAT32 else number

    def _texts(self, count: int, what: str) -> list[Value]:
        """Like so many calls of `text`, of which a vocabulary would take several hundred thousand."""
        texts: list[Value] = []
        data, position, limit = self.data, self.position, self.limit
        for _ in range(count):
            begin = position + 8
            size = int.from_bytes(data[position:begin], "little")
            position = begin + size
            if size > MAX_TEXT_BYTES or position > limit:
                return self._refused_text(begin - 8, what)
            try:
                texts.append(data[begin:position].decode("utf-8"))
            except UnicodeDecodeError:
                return self._refused_text(begin - 8, what)
        self.position = position
        return texts

    def _refused_text(self, position: int, what: str) -> NoReturn:
        """Raise what `text` says of the text that begins there."""
        self.position = position
        self.text(what)
        raise AssertionError("the text was refused before")

    def _flag(self, what: str) -> bool:
        byte = self.take(1, what)[0]
        if byte > 1:
            raise HeaderProblem(f"{what} is the flag {shown(byte)}, which is neither 0 nor 1")
        return bool(byte)

    def _array(self, what: str, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise HeaderProblem(f"{what} has arrays more than {MAX_DEPTH} deep")
        kind = self.uint32(f"the type of the elements of {what}")
        numbers = array(NUMBERS[kind]) if kind in NUMBERS else None
        least_bytes = numbers.itemsize if numbers is not None else {TEXT: 8, ARRAY: 12}.get(kind, 1)
        what_count = f"the number of elements of {what}"
        count = self.count(what_count, most=MAX_VALUES - self.num_values, least_bytes=least_bytes)
        self.num_values += count
        if kind == TEXT:
            return self._texts(count, what)
        if numbers is None:
            return [self._value(kind, what, depth) for _ in range(count)]
        numbers.frombytes(self.take(count * least_bytes, what))
        return numbers


def as_written(number: float) -> float:
    """A float32 as the shortest decimal that is rounded to it: 1e-06, not 9.999999974752427e-07."""
    stored = struct.pack("<f", number)
    decimals = (float(f"{number:.{digits}g}") for digits in range(6, 10))
    return next((short for short in decimals if abs(short) < 3e38 and struct.pack("<f", short) == stored), number)
