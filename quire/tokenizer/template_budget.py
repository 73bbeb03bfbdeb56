"""What one rendering of a chat template may use, and how much an operation is about to use.

An operation that can make much text of little (`*`, `%`, replace, join, format...) has an estimate here, which is asked
before the operation runs: memory that is not allocated need not be freed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import jinja2

MAX_WIDTH = 1_000
MAX_BITS = 100_000


class BudgetExceeded(jinja2.TemplateError):
    """A rendering took too long or grew too large."""


@dataclass(slots=True)
class Budget:
    """What one rendering may use."""

    max_characters: int
    """Of output; ten times as many may be made on the way to it."""
    max_seconds: float
    deadline: float = field(init=False)
    num_made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.max_seconds

    def check_time(self) -> None:
        """Raises: BudgetExceeded after the deadline."""
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it ran longer than {self.max_seconds:g} seconds")

    def spend(self, num_characters: int) -> None:
        """Account for a string that was, or is about to be, made.

        Raises: BudgetExceeded when all of them together are too much.
        """
        self.num_made += num_characters
        if self.num_made > 10 * self.max_characters:
            raise BudgetExceeded(f"it builds more than {10 * self.max_characters} characters of text")

    def check_output(self, num_characters: int) -> None:
        """Raises: BudgetExceeded for an output that is too long."""
        if num_characters > self.max_characters:
            raise BudgetExceeded(f"its output has more than {self.max_characters} characters")


_current: ContextVar[Budget] = ContextVar("template_budget")


def current_budget() -> Budget:
    """The budget of the rendering that is going on in this thread."""
    return _current.get()


@contextmanager
def within(budget: Budget) -> Iterator[None]:
    """Make a budget the current one."""
    token = _current.set(budget)
    try:
        yield
    finally:
        _current.reset(token)


def size_of(value: object) -> int:
    """Characters that `value` has as text, about; more than the budget when it is too much to count."""
    if isinstance(value, str):
        return len(value)
    budget = current_budget()
    limit = 10 * budget.max_characters
    total, stack = 0, [value]
    while stack and total <= limit:
        item = stack.pop()
        if total % 4096 < 8:
            budget.check_time()
        total += len(item) if isinstance(item, str) else 8
        if isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
    return total


def operator_size(operator: str, left: object, right: object) -> int:
    """Characters (or eighths of list items) that `left operator right` makes, at most.

    Raises: BudgetExceeded for numbers of too many bits.
    """
    if operator == "%":
        return _printf_size(left, *(right if isinstance(right, tuple) else (right,))) if isinstance(left, str) else 0
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(operator, left, right)
        return 0
    if operator == "*":
        sequence, count = (left, right) if isinstance(right, int) else (right, left)
        return _length(sequence) * max(count, 0) if isinstance(count, int) else 0
    return _length(left) + _length(right)


def _check_bits(operator: str, left: int, right: int) -> None:
    num_bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
    if num_bits > MAX_BITS:
        raise BudgetExceeded(f"it computes a number of more than {MAX_BITS} bits")


def _length(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple)) else 0


_NUMBER = re.compile(r"\d+")
_PRINTF_FIELD = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*")
_FORMAT_FIELD = re.compile(r"\{[^{}:]*(:[^}]*)?")


def _printf_size(pattern: object, *args: object, **kwargs: object) -> int:
    text = str(pattern)
    return _filled_size(text, _PRINTF_FIELD.findall(text), [*args, *kwargs.values()])


def _format_size(pattern: object, *args: object, **kwargs: object) -> int:
    text = str(pattern)
    return _filled_size(text, _FORMAT_FIELD.findall(text), [*args, *kwargs.values()])


def _filled_size(text: str, fields: list[str], values: list[object]) -> int:
    """Characters of a pattern with its fields filled, at most."""
    widths = sum(_width(int(number[:9])) for field in fields for number in _NUMBER.findall(field))
    if any("*" in field or "{" in field for field in fields):
        widths += len(fields) * sum(_width(value) for value in values if isinstance(value, int))
    return len(text) + widths + len(fields) * max(map(size_of, values), default=0)


def _width(value: object) -> int:
    """Raises: BudgetExceeded for a width, precision or indentation that no text needs."""
    width = len(value) if isinstance(value, str) else abs(value) if isinstance(value, int) else 0
    if width > MAX_WIDTH:
        raise BudgetExceeded(f"it asks for a width of {width} characters, more than {MAX_WIDTH}")
    return width


def _padded_size(text: object, width: object = 80, *_: object, **named: object) -> int:
    return size_of(text) + _width(named.get("width", width))


def _replace_size(text: object, old: object, new: object, *_: object, **__: object) -> int:
    whole = str(text)
    return len(whole) + whole.count(str(old)) * len(str(new))


def _join_size(separator: object, items: object) -> int:
    values = items if isinstance(items, (list, tuple)) else ()
    return size_of(items) + len(str(separator)) * len(values)


def _join_filter_size(items: object, d: object = "", *_: object, **named: object) -> int:
    return _join_size(named.get("d", d), items)


def _indent_size(text: object, width: object = 4, *_: object, **named: object) -> int:
    whole = str(text)
    return len(whole) + (whole.count("\n") + 1) * _width(named.get("width", width))


def _json_size(value: object, ensure_ascii: object = False, indent: object = None, *_: object, **named: object) -> int:
    return size_of(value) * (2 + _width(named.get("indent", indent)))


def _batch_size(value: object, linecount: object, *_: object) -> int:
    return _width(linecount)


def _sum_size(value: object, attribute: object = None, start: object = 0, **_: object) -> int:
    if not isinstance(start, (int, float)):
        raise TypeError("sum adds numbers only")
    return 0


Estimate = Callable[..., int]
"""Takes what the operation takes, gives the number of characters it makes at most."""
METHOD_ESTIMATES: dict[str, Estimate] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded_size),
    "format": _format_size,
    "join": _join_size,
    "replace": _replace_size,
}
FILTER_ESTIMATES: dict[str, Estimate] = {
    "batch": _batch_size,
    "center": _padded_size,
    "format": _printf_size,
    "indent": _indent_size,
    "join": _join_filter_size,
    "replace": _replace_size,
    "string": size_of,
    "sum": _sum_size,
    "tojson": _json_size,
}
