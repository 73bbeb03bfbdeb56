"""Progress bars for long work, on standard error, only where somebody looks at a terminal or a notebook."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

MIN_BYTES = 256 << 20
"""Smaller checkpoints load faster than a bar can be read."""
MIN_PAUSE_S = 0.1
"""Between two lines in a notebook, each of which is a message to the browser."""


@contextmanager
def load_progress(show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for (bytes read, bytes in all) that draws a bar for checkpoints worth one."""
    if not show or not sys.stderr.isatty():
        with _load_line() if show and _is_notebook() else nullcontext() as line:
            yield line
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
        with _generate_line(num_requests) if show and _is_notebook() else nullcontext(_ignore) as line:
            yield line
        return
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
            bar.update(task, completed=finished, rates=_rates(started_at, prompt, output))

        yield update


@contextmanager
def quantize_progress(show: bool) -> Iterator[Callable[[int, int], None]]:
    """A callback for (layers written, layers in all) that draws a bar."""
    if not show or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("quantising layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


def _is_notebook() -> bool:
    """Whether this is a cell of a notebook: what it writes to standard error is shown, though it is no terminal."""
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console(stderr=True).is_jupyter


class _NotebookLine:
    """A line that is written over and over; rich's bar needs ipywidgets in a notebook."""

    def __init__(self) -> None:
        self._text = ""
        self._written_at = time.perf_counter()

    def write(self, text: str) -> None:
        """Show a text instead of the last one, unless that was a moment ago."""
        self._text = text
        if time.perf_counter() - self._written_at >= MIN_PAUSE_S:
            self._print(end="")

    def end(self) -> None:
        """Leave the last text below the cell."""
        if self._text:
            self._print(end="\n")

    def _print(self, end: str) -> None:
        self._written_at = time.perf_counter()
        print(f"\r{self._text:<70}", end=end, file=sys.stderr, flush=True)


@contextmanager
def _load_line() -> Iterator[Callable[[int, int], None]]:
    started_at, line = time.perf_counter(), _NotebookLine()

    def update(done: int, total: int) -> None:
        if total >= MIN_BYTES:
            rate = done / max(time.perf_counter() - started_at, 1e-9) / 1e6
            line.write(f"loading weights: {done / 1e6:.0f}/{total / 1e6:.0f} MB, {rate:.0f} MB/s")

    try:
        yield update
    finally:
        line.end()


@contextmanager
def _generate_line(num_requests: int) -> Iterator[Callable[[int, int, int], None]]:
    started_at, line = time.perf_counter(), _NotebookLine()

    def update(finished: int, prompt: int, output: int) -> None:
        line.write(f"processed prompts: {finished}/{num_requests}, {_rates(started_at, prompt, output)}")

    try:
        yield update
    finally:
        line.end()


def _ignore(finished: int, prompt: int, output: int) -> None:
    """Draw nothing."""


def _rates(started_at: float, num_prompt_tokens: int, num_output_tokens: int) -> str:
    elapsed = max(time.perf_counter() - started_at, 1e-9)
    return f"in {num_prompt_tokens / elapsed:.0f} tok/s, out {num_output_tokens / elapsed:.0f} tok/s"
