"""A core process whose start fails as a script says: what runs is quire's own, but for a ledger that acts in stages.

The file that FAILING_STARTS names has a line for each start still to come, which takes the first: `hang STAGE`,
`raise STAGE`, `crash STAGE`, `work STAGE` (ten seconds of computing that report their progress) or `good`. Without
lines starts are good.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.engine.process import core_process
from quire.observability.ledger import Ledger

MODULE = "tests.engine.process.failing_start"
SCRIPT = "FAILING_STARTS"
PROCESS = "process"
"""Before the first stage, when no heartbeat has been sent."""


def take_line() -> tuple[str, str]:
    """What this start does, and in which stage."""
    path = Path(os.environ[SCRIPT])
    line, _, rest = path.read_text().partition("\n")
    path.write_text(rest)
    action, _, stage = line.partition(" ")
    return action, stage


class ActingLedger(Ledger):
    """Acts when the stage begins."""

    def __init__(self, action: str, stage: str) -> None:
        super().__init__()
        self.action, self.acting_stage = action, stage

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with super().stage(name):
            if name == self.acting_stage:
                self.act()
            yield

    def act(self) -> None:
        if self.action == "hang":
            time.sleep(1000)
        elif self.action == "raise":
            raise OverflowError("a number of 400 digits")
        elif self.action == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self.action == "work":
            for _ in range(20):
                time.sleep(0.5)
                self.progress += 1


if __name__ == "__main__":
    action, stage = take_line()
    if (action, stage) == ("hang", PROCESS):
        time.sleep(1000)
    core_process.main(ledger=ActingLedger(action, stage))
