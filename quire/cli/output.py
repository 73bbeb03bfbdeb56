"""Output: what cannot be written is said in one line, never as a traceback; what models and servers say is text, and no
command to the terminal."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from quire.errors import ConfigError

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters: a terminal would take what follows one for a command."""
    return text.translate(_CONTROLS)


def say(text: str) -> None:
    """Print a message to standard error. It may quote a model, a server or a file."""
    print(printable(text), file=sys.stderr, flush=True)


def check_writable(flag: str, name: str | Path) -> None:
    """Find out before any time is spent whether a file can be written. Leaves no file behind.

    Raises: ConfigError.
    """
    path = Path(name)
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path} cannot be written: {reason_of(error)}") from None


def write_json(name: str | Path, value: Any) -> None:
    """Write a file of JSON as a whole: one that cannot be written to its end is not left behind.

    Raises: OSError naming the file.
    """
    path = Path(name).resolve()
    text = json.dumps(value, indent=2) + "\n"
    is_plain = path.is_file() or not path.exists()
    target = path.with_name(f".{path.name}.{os.getpid()}") if is_plain else path
    try:
        target.write_text(text, encoding="utf-8")
        if is_plain:
            target.replace(path)
    except OSError as error:
        if is_plain:
            target.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot be written: {reason_of(error)}", str(name)) from None


def reason_of(error: Exception) -> str:
    """What the system says, without number and file name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def report(error: OSError) -> None:
    """Print one line about a file or stream that failed."""
    is_output = error.filename is None and error.errno in WRITE_ERRORS  # files are named
    what = "standard output cannot be written: " if is_output else f"{error.filename}: " if error.filename else ""
    say(f"quire: {what}{reason_of(error)}")


def open_closed_streams() -> None:
    """Let standard streams that the caller has closed lead nowhere, so that no other file gets their descriptors."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open until the process ends)


def end_process(status: int) -> NoReturn:
    """End without tearing down the interpreter: it would take time, and its last part knows no signal handlers."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(status)
