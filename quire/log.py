"""Loggers under one name, one format, written to stderr once somebody configures them."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path

from quire import envs

FORMATS = ("text", "json")
MAX_CALLS = 12
"""That `trace_of` shows, from the innermost."""
request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request on whose behalf the running task or thread works; every line it logs carries it."""


class TextFormatter(logging.Formatter):
    """One line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the request it is about unless it says so itself."""
        line = super().formatMessage(record)
        current = request_id.get()
        return f"{line} request={current}" if current and "request=" not in line else line


class JsonFormatter(logging.Formatter):
    """One JSON object on one line for machines."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; request_id and exception only where there are any."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            entry["request_id"] = request_id.get()
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_default_level(level: str) -> None:
    """The level of quire's own handler unless QUIRE_LOG_LEVEL says otherwise."""
    if "QUIRE_LOG_LEVEL" not in os.environ:
        get_logger("quire").setLevel(level)


def configure(log_format: str | None, level: str | None) -> None:
    """Format and level for this process and those it starts; None leaves them to the environment."""
    given = {"QUIRE_LOG_FORMAT": log_format, "QUIRE_LOG_LEVEL": level}
    os.environ.update({name: value for name, value in given.items() if value is not None})
    logger = get_logger("quire")
    if not logger.propagate:  # the handler is ours
        logger.setLevel(envs.get("QUIRE_LOG_LEVEL"))
        for handler in logger.handlers:
            handler.setFormatter(_formatter())


def adopt(*names: str) -> None:
    """Have other packages' loggers write as quire does, unless the application has its own handlers."""
    logger = get_logger("quire")
    for other in map(logging.getLogger, names):
        if not logger.propagate and not other.handlers:
            other.handlers = list(logger.handlers)
            other.propagate = False


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the first call installs quire's handler unless the application has its own."""
    root = logging.getLogger("quire")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_formatter())
        root.addHandler(handler)
        root.setLevel(envs.get("QUIRE_LOG_LEVEL"))
        root.propagate = False
    return logging.getLogger(name)


def trace_of(error: BaseException) -> str:
    """What was raised, and through which calls, on one line. Without the error's text, which may quote a client."""
    calls = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)[-MAX_CALLS:]
    ]
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    text = f"{type(error).__name__} in {', '.join(reversed(calls)) or 'no frame'}"
    return text if cause is None or cause is error else f"{text}; after {type(cause).__name__}"


def _formatter() -> logging.Formatter:
    return JsonFormatter() if envs.get("QUIRE_LOG_FORMAT") == "json" else TextFormatter()
