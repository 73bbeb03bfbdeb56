"""Collections of garbage that are never long: while one runs, every thread of the process stands still.

Python looks at all objects again whenever their number has grown by a quarter. With the values of some large request
bodies alive that takes 100 ms, and finds nothing: they hold no cycles. So only young objects are looked at often, and
all of them now and then, at a moment without such bodies.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

YOUNG, MIDDLE = 2_000, 5
"""So many new objects start a collection of them; so many of those one of what survived: a few milliseconds."""
NEVER = 1_000_000
COLLECT_S = 20.0
"""All objects are looked at so often, where there is a good moment."""
LOOK_S = 0.05
PATIENCE_S = 600.0
"""Without one for so long they are looked at all the same. Requests leave no cycles; what does is rare and small."""


@contextmanager
def none_collected() -> Iterator[None]:
    """Collect nothing while the block runs, and take what it made for old: imports make many objects and no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > gc.get_threshold()[0] and not gc.get_freeze_count():  # which counts one by one
            gc.freeze()
            gc.unfreeze()  # what was frozen joins the oldest objects, none of which was looked at
        if was_enabled:
            gc.enable()


def settle() -> None:
    """What is here now stays: no collection looks at it again; and from now on only young objects are looked at."""
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


async def collect_now_and_then(is_busy: Callable[[], bool]) -> None:
    """Look at all objects now and then, when that does not take long; runs until cancelled."""
    while True:
        await asyncio.sleep(COLLECT_S)
        at_last = time.monotonic() + PATIENCE_S
        while is_busy() and time.monotonic() < at_last:
            await asyncio.sleep(LOOK_S)
        if gc.get_threshold()[2] == NEVER:  # in a process of its own, after `settle`
            gc.collect()
