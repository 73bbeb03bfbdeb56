"""What a front and its checker process say to each other: frames of a length and msgpack, over a pair of pipes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from quire.structured.grammar import Grammar, Vocabulary
from quire.structured.params import StructuredOutputsParams

LENGTH = struct.Struct(">I")
CPU_S = 0.7
"""Seconds of computing that a check may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Front -> checker, first: the vocabulary that grammars are compiled with."""

    vocabulary: Vocabulary
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Front -> checker: what a request asks for."""

    check_id: int
    params: StructuredOutputsParams
    limit_s: float
    """Seconds of computing that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Checker -> front: a grammar that can be used, or why there is none."""

    grammar: Grammar | None = None
    message: str = ""
    parameter: str = ""
    is_unsupported: bool = False
    is_final: bool = True
    """Another check would come to the same."""
    is_slow: bool = False
    """It took as long as it might, so a longer check may come to something else."""
    cpu_s: float = 0.0
    """Seconds of computing that the check took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Checker -> front: the verdict on a check."""

    check_id: int
    verdict: Verdict


def frame(message: object) -> bytes:
    """A message as bytes."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that these bytes complete."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer)
            end = LENGTH.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield body
