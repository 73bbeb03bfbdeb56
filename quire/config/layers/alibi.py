"""ALiBi (Press et al. 2022, arXiv:2108.12409): what each head's scores lose with each token of distance."""

from __future__ import annotations

import math
import struct


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """A geometric series that ends at 2^-8; what is beyond a power of two is every other number of the next series."""
    power = 2 ** math.floor(math.log2(num_heads))
    return (*_series(power), *_series(2 * power)[0 : 2 * (num_heads - power) : 2])


def interleaved_slopes(num_heads: int) -> tuple[float, ...]:
    """The series of the next power of two; where that is more, first every other number from the second on, then the
    rest."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = _series(power)
    return slopes if power == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def _series(count: int) -> tuple[float, ...]:
    return tuple(2.0 ** (-8.0 * number / count) for number in range(1, count + 1))


def in_bfloat16(x: float) -> float:
    """The nearest number that bfloat16 has, the even one of two."""
    (bits,) = struct.unpack("<I", struct.pack("<f", x))
    kept = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    (rounded,) = struct.unpack("<f", struct.pack("<I", kept))
    return float(rounded)
