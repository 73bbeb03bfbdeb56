"""Integer arithmetic that is easy to get wrong by one."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least a."""
    return cdiv(a, multiple) * multiple
