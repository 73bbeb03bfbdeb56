"""Answers as Markdown while they stream: finished blocks are printed once, the last one is drawn again as it grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from quire.cli.output import printable
from quire.cli.terminal.answer import write_plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

REDRAW_S = 0.08
"""Seconds between two drawings of the block that grows."""


class Display(Protocol):
    """Where an answer goes."""

    def write(self, text: str) -> None:
        """Show a piece of it."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show what is left."""


def create_display(*, plain: bool) -> Display:
    """Markdown on a terminal, else the text as it is."""
    return PlainDisplay() if plain or not sys.stdout.isatty() else MarkdownDisplay()


class PlainDisplay:
    """The text as it is, with a line break at the end."""

    def write(self, text: str) -> None:
        """Print it at once."""
        write_plain(text)

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        write_plain("\n")


class MarkdownDisplay:
    """Rendered by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._rest = ""
        self._drawn_at = 0.0

    def write(self, text: str) -> None:
        """Draw the block that grows, and print those that are finished."""
        from rich.markdown import Markdown

        finished, self._rest = split_blocks(self._rest + printable(text))
        if finished.strip():
            self._console.print(Markdown(finished))
        if finished or time.monotonic() - self._drawn_at >= REDRAW_S:
            self._drawn_at = time.monotonic()
            self._live.update(_Tail(self._rest), refresh=True)

    def __enter__(self) -> MarkdownDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        from rich.markdown import Markdown

        self._live.stop()
        if self._rest.strip():
            self._console.print(Markdown(self._rest))
        self._rest = ""


class _Tail:
    """The last lines of a block, as many as the terminal shows."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.markdown import Markdown
        from rich.segment import Segment

        lines = console.render_lines(Markdown(self._text), options, pad=False) if self._text.strip() else []
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def split_blocks(text: str) -> tuple[str, str]:
    """(finished blocks, the rest): a block ends at an empty line that is in no fenced code."""
    end = position = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        mark = line.strip()[:3]
        if mark in ("```", "~~~") and fence in ("", mark):
            fence = "" if fence else mark
        if not fence and not line.strip() and line.endswith("\n"):
            end = position
    return text[:end], text[end:]
