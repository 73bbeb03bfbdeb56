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
