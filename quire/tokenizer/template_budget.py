"""What one rendering of a chat template may use, and what its values weigh.

A budget counts steps (values visited, pieces of text read), characters of all text made, and time. Whatever an
operation walks is weighed and charged before the operation runs: what runs in C cannot be interrupted, and memory that
is not allocated need not be freed.
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, TemplateReference
from jinja2.utils import Namespace

from quire.utils.cancellation import check_cancelled

MAX_STEPS = 2_000_000
"""Per rendering. A loop iteration, a call, a value that an operation visits: a step each."""
MAX_OPERATION = 400_000
"""Steps of a single operation, which nothing interrupts: some 50 ms."""
MAX_VALUE_DEPTH = 200
"""Levels of lists and objects in a value that an operation walks."""
MAX_WIDTH = 1_000
MAX_BITS = 20_000
CHARACTERS_PER_STEP = 64
STEPS_PER_LOOK = 500


class BudgetExceeded(jinja2.TemplateError):
    """A rendering took too long or grew too large."""


@dataclass(slots=True)
class Budget:
    """What one rendering may use."""

    max_characters: int
    """Of output; ten times as many may be made on the way to it."""
    max_seconds: float
    max_steps: int = MAX_STEPS
    deadline: float = field(init=False)
    num_made: int = field(init=False, default=0)
    num_steps: int = field(init=False, default=0)
    next_look: int = field(init=False, default=STEPS_PER_LOOK)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.max_seconds

    def step(self, count: int = 1) -> None:
        """Count steps; look at the clock and at the client now and then.

        Raises: BudgetExceeded when they are too many; what the cancellation check raises.
        """
        self.num_steps += count
        if self.num_steps > self.max_steps:
            raise BudgetExceeded(f"it takes more than {self.max_steps} steps")
        if self.num_steps >= self.next_look:
            self.next_look = self.num_steps + STEPS_PER_LOOK
            self.check_time()

    def operate(self, steps: int) -> None:
        """Count an operation that runs in one go.

        Raises: BudgetExceeded when it is too large by itself, or with all before it.
        """
        if steps > MAX_OPERATION:
            raise BudgetExceeded(f"it has an operation of more than {MAX_OPERATION} steps")
        self.step(steps)

    def check_time(self) -> None:
        """Raises: BudgetExceeded after the deadline; what the cancellation check raises."""
        check_cancelled()
        if time.monotonic() > self.deadline:
            raise BudgetExceeded(f"it ran longer than {self.max_seconds:g} seconds")

    def reserve(self, num_characters: int) -> None:
        """Raises: BudgetExceeded when so much more text would be too much."""
        if self.num_made + num_characters > 10 * self.max_characters:
            raise BudgetExceeded(f"it builds more than {10 * self.max_characters} characters of text")

    def spend(self, num_characters: int) -> None:
        """Account for text that was, or is about to be, made.

        Raises: BudgetExceeded when all of it together is too much.
        """
        self.reserve(num_characters)
        self.num_made += num_characters

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


@dataclass(frozen=True, slots=True)
class Weight:
    """The size of values as a tree: what is shared counts each time it is reached."""

    num_values: int
    num_characters: int
    num_levels: int = 1

    @property
    def steps(self) -> int:
        """What an operation that visits everything once costs."""
        return self.num_values + self.num_characters // CHARACTERS_PER_STEP

    @property
    def text(self) -> int:
        """Characters of the values written out, at most: inside a list, one may become ten (`\\U0001f600`)."""
        return self.num_characters * (10 if self.num_levels > 1 else 1) + 8 * self.num_values


_LEAVES = (
    type(None),
    int,
    float,
    complex,
    range,
    jinja2.Undefined,
    LoopContext,
    TemplateReference,
    Iterator,
)
"""What a template can hold beside containers, strings and functions: a short text, nothing to walk."""


def weigh(*values: object) -> Weight:
    """The weight of values, level by level; the walk itself is charged.

    Raises: BudgetExceeded beyond what one operation may visit; SecurityError for values of unknown kinds.
    """
    if len(values) == 1 and isinstance(values[0], str):
        return Weight(1, len(values[0]))
    budget = current_budget()
    level: list[object] = list(values)
    num_values = num_characters = depth = 0
    while level:
        num_values += len(level)
        depth += 1
        if depth > MAX_VALUE_DEPTH:
            raise BudgetExceeded(f"it uses a value of more than {MAX_VALUE_DEPTH} levels")
        below: list[object] = []
        for value in level:
            if isinstance(value, str):
                num_characters += len(value)
                continue
            inner = _children(value)
            if inner is None:
                num_characters += value.bit_length() // 3 if isinstance(value, int) else 32
                continue
            if num_values + len(below) + len(inner) > MAX_OPERATION:
                raise BudgetExceeded(f"it has an operation of more than {MAX_OPERATION} steps")
            budget.step()
            below.extend(inner)
        budget.step(len(level) // 4)
        level = below
    return Weight(num_values, num_characters, depth)


def _children(value: object) -> list[object] | tuple[object, ...] | None:
    """What a container holds; None for what is none."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, _LEAVES) or callable(value):
        return None
    if isinstance(value, Namespace):
        return list(object.__getattribute__(value, "_Namespace__attrs").values())
    if isinstance(value, (KeysView, ValuesView, ItemsView)):
        return list(value)
    raise SecurityError(f"a template cannot use a value of the type {type(value).__name__}")
