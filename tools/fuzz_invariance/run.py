"""Runs the cases of many seeds, in this process or in several."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tools.fuzz_invariance.check import Checker, Verdict
from tools.fuzz_invariance.draw import draw_case
from tools.fuzz_invariance.engines import Engines

SEEDS_AT_ONCE = 20
"""That a process is given."""


def quiet() -> None:
    """Say nothing of quarantined requests: they are wanted."""
    logging.getLogger("quire").setLevel(logging.CRITICAL)


def verdicts(checker: Checker, seeds: range, fault: str | None, jobs: int) -> Iterator[Verdict]:
    """One for each seed, in order."""
    if jobs == 1:
        for seed in seeds:
            yield checker.check(draw_case(seed), fault)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start_process, (checker.directory,)) as pool:
        parts = [seeds[first : first + SEEDS_AT_ONCE] for first in range(0, len(seeds), SEEDS_AT_ONCE)]
        waiting = [pool.submit(_check_all, part, fault) for part in parts]
        try:
            for part_of in waiting:
                yield from part_of.result()
        finally:
            pool.shutdown(cancel_futures=True)


_process: list[Checker] = []
"""The one of a process that was started for some of the seeds."""


def _start_process(directory: Path) -> None:
    quiet()
    _process.append(Checker(Engines(directory)))


def _check_all(seeds: range, fault: str | None) -> list[Verdict]:
    return [_process[0].check(draw_case(seed), fault) for seed in seeds]
