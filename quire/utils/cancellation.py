"""Work that can be abandoned: long computations ask now and then whether anybody still wants the result.

The caller says how to find out (`cancelled_by`); the work asks (`check_cancelled`). Knows no requests and no threads:
the question belongs to the current context (`contextvars`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_check: ContextVar[Callable[[], None] | None] = ContextVar("cancellation_check", default=None)


def check_cancelled() -> None:
    """Go on, or raise what the caller's check raises. Costs some 50 ns when nobody asked for it."""
    check = _check.get()
    if check is not None:
        check()


@contextmanager
def cancelled_by(check: Callable[[], None]) -> Iterator[None]:
    """Let `check` end the work inside by raising an exception of its own; checks from outside still count."""
    outer = _check.get()

    def both() -> None:
        if outer is not None:
            outer()
        check()

    token = _check.set(both)
    try:
        yield
    finally:
        _check.reset(token)
