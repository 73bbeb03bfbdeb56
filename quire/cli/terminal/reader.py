"""Questions from a person at a terminal, with line editing and a history, or from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.terminal.answer import read_line

if TYPE_CHECKING:
    from prompt_toolkit.history import History

Reader = Callable[[], str | None]
"""The next question, None at the end."""
PROMPT = ">>> "


def create_reader(commands: Sequence[str], *, keep_history: bool) -> Reader:
    """An editor on a terminal that can have one, else lines of standard input."""
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if not is_terminal:
        return lambda: read_line(sys.stdin.isatty())
    return _editor(commands, keep_history=keep_history)


def _editor(commands: Sequence[str], *, keep_history: bool) -> Reader:
    """Enter sends, Alt-Enter starts a new line, pasted lines stay together; Ctrl-C clears, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        PROMPT,
        history=_history(keep=keep_history),
        key_bindings=keys,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        reserve_space_for_menu=0,
        prompt_continuation="... ",
        output=create_output(stdout=sys.stderr),
    )

    def read() -> str | None:
        while True:
            try:
                return session.prompt()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return None

    return read


def history_file() -> Path:
    """Where questions are kept between sessions."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "quire/chat_history"


def _history(*, keep: bool) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not keep:
        return InMemoryHistory()
    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:  # a home that cannot be written
        return InMemoryHistory()
    return FileHistory(str(file))
