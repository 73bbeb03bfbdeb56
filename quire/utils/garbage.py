"""Collections of garbage that are never long: while one runs, every thread of the process stands still.

Python looks at all objects again whenever their number has grown by a quarter. With the values of some large request
bodies alive that takes 100 ms, and finds nothing: they hold no cycles. So only young objects are looked at often, and
all of them now and then, at a moment without such bodies.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

YOUNG, MIDDLE = 2_000, 5
"""So many new objects start a collection of them; so many of those one of what survived: a few milliseconds."""
NEVER = 1_000_000
CHECK_S = 20.0
MAX_BUSY_CHECKS = 3
"""After so many checks at which a collection would have taken long, all are looked at all the same."""


def settle() -> None:
    """What is here now stays: no collection looks at it again; and from now on only young objects are looked at."""
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


async def collect_now_and_then(is_busy: Callable[[], bool]) -> None:
    """Look at all objects now and then, when that does not take long; runs until cancelled."""
    num_busy = 0
    while True:
        await asyncio.sleep(CHECK_S)
        num_busy = num_busy + 1 if is_busy() else 0
        if num_busy % MAX_BUSY_CHECKS == 0 and gc.get_freeze_count():  # in a process of its own, after `settle`
            gc.collect()
