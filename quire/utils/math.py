"""Arithmetic that is easy to get wrong by one."""

from __future__ import annotations

from collections.abc import Sequence


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least a."""
    return cdiv(a, multiple) * multiple


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of a non-empty set lie, interpolated."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def keeps_share(limit: int, *, own: int, total: int, num_active: int) -> bool:
    """Whether all together keep a limit, or else whoever asks keeps an equal share of it.

    So nobody can fill a limit and shut others out. All together may exceed it, by the sum of 1/2, 1/3 ... of it for the
    second, the third ... who comes.
    """
    return total <= limit or (num_active > 1 and own <= limit // num_active)
