"""Seeded damage to the bytes of a file: what a bad disk, a bad transfer, or somebody who means harm makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable

NUMBERS = (0, 1, 2, 7, 2**7, 2**8 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
"""What overflows where somebody counts with fewer bits."""


def mutated(data: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """The data with one to four kinds of damage, most of it among the first `header_bytes`."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(KINDS)(result, min(header_bytes, len(result)), rng)
    return bytes(result)


def _flip(data: bytearray, end: int, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 16))):
        if end:
            data[rng.randrange(end)] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, end: int, rng: random.Random) -> None:
    del data[rng.randrange(rng.choice((end, len(data))) + 1) :]


def _number(data: bytearray, end: int, rng: random.Random) -> None:
    """Eight or four bytes become a number that is hard to count with."""
    size = rng.choice((4, 8))
    place = rng.randrange(max(1, end - size))
    data[place : place + size] = (rng.choice(NUMBERS) % 256**size).to_bytes(size, "little")


def _small_number(data: bytearray, end: int, rng: random.Random) -> None:
    """Four bytes become another type, or a small count."""
    place = rng.randrange(max(1, end - 4))
    data[place : place + 4] = rng.randrange(64).to_bytes(4, "little")


def _add(data: bytearray, end: int, rng: random.Random) -> None:
    place = rng.randrange(end + 1)
    data[place:place] = rng.randbytes(rng.choice((1, 8, 100)))


def _remove(data: bytearray, end: int, rng: random.Random) -> None:
    place = rng.randrange(end + 1)
    del data[place : place + rng.choice((1, 8, 100))]


def _repeat(data: bytearray, end: int, rng: random.Random) -> None:
    """A part of the header stands there twice."""
    place, size = rng.randrange(end + 1), rng.choice((16, 64, 256))
    data[place:place] = data[place : place + size]


def _noise(data: bytearray, end: int, rng: random.Random) -> None:
    place, size = rng.randrange(end + 1), rng.choice((4, 32, 256))
    data[place : place + size] = rng.randbytes(size)


KINDS: tuple[Callable[[bytearray, int, random.Random], None], ...] = (
    _flip,
    _flip,
    _number,
    _number,
    _small_number,
    _truncate,
    _add,
    _remove,
    _repeat,
    _noise,
)
