"""Progress bars for long work, on standard error, only where somebody looks at a terminal (or asks for them)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MIN_BYTES = 256 << 20
"""Smaller checkpoints load faster than a bar can be read."""


@contextmanager
def load_progress(show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for (bytes read, bytes in all) that draws a bar for checkpoints worth one."""
    if not show or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task: list[TaskID] = []

        def update(done: int, total: int) -> None:
            if total >= MIN_BYTES:
                if not task:
                    task.append(bar.add_task("", total=total))
                bar.update(task[0], completed=done)

        yield update


@contextmanager
def generate_progress(show: bool, num_requests: int) -> Iterator[Callable[[int, int, int], None]]:
    """A callback for (requests finished, prompt tokens, output tokens): so many of `num_requests`, and tokens/s."""
    if not show or not sys.stderr.isatty():
        yield lambda finished, prompt, output: None
        return
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("processed prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rates]}"),
    )
    started_at = time.perf_counter()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=num_requests, rates="")

        def update(finished: int, prompt: int, output: int) -> None:
            elapsed = max(time.perf_counter() - started_at, 1e-9)
            bar.update(
                task, completed=finished, rates=f"in {prompt / elapsed:.0f} tok/s, out {output / elapsed:.0f} tok/s"
            )

        yield update
