"""Compare the answers of random mixes with those of each request alone.

    python -m tools.fuzz_invariance --seeds 0:10000 [--jobs 2] [--seconds 600] [--planted stale-page]

A case is a seed. The first one that fails is made smaller and described, and the exit status is 1. `--planted` breaks
the engine under test on purpose: then a case has to fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tools.fuzz_invariance.cases import Case
from tools.fuzz_invariance.check import Checker, Verdict
from tools.fuzz_invariance.draw import draw_case
from tools.fuzz_invariance.engines import Engines
from tools.fuzz_invariance.faults import FAULTS
from tools.fuzz_invariance.run import quiet, verdicts
from tools.fuzz_invariance.shrink import shrink


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; the exit status says whether one failed."""
    args = _parser().parse_args(argv)
    quiet()
    with tempfile.TemporaryDirectory() as directory:
        engines = Engines(Path(directory))
        engines.write_all()
        try:
            checker = Checker(engines)
            counts, failed = _run(checker, args)
            _report(counts)
            if failed is None:
                return 0
            _explain(checker, failed, args.planted)
        finally:
            engines.close()
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fuzz_invariance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=_seeds, default=range(1000), help="FIRST:END, or one seed (default: 0:1000)")
    parser.add_argument("--planted", choices=sorted(FAULTS), help="the fault that the engine shall have")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    return parser


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    return range(int(first), int(end) if colon else int(first) + 1)


def _run(checker: Checker, args: argparse.Namespace) -> tuple[Counter[str], Verdict | None]:
    """What all cases together have reached, and the first that failed."""
    counts: Counter[str] = Counter()
    ends_at = time.monotonic() + args.seconds
    columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(args.seeds))
        for verdict in verdicts(checker, args.seeds, args.planted, args.jobs):
            counts["cases"] += 1
            counts += verdict.counts
            bar.advance(task)
            if verdict.problems:
                return counts, verdict
            if time.monotonic() > ends_at:
                break
    return counts, None


def _report(counts: Counter[str]) -> None:
    print(", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())))


def _explain(checker: Checker, failed: Verdict, fault: str | None) -> None:
    """Describe a failing case, made smaller, and say how to run it again."""

    def fails(case: Case) -> bool:
        return bool(checker.check(case, fault).problems)

    print(f"\nseed {failed.seed} fails:", *failed.problems, sep="\n  ")
    case = shrink(draw_case(failed.seed), fails)
    print("\na smaller case that fails:", case.describe(), *checker.check(case, fault).problems, sep="\n  ")
    again = f"python -m tools.fuzz_invariance --seeds {failed.seed}"
    print(f"\nagain: {again} --planted {fault}" if fault else f"\nagain: {again}")


if __name__ == "__main__":
    sys.exit(main())
