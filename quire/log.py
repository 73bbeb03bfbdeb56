"""Loggers under one name, one format, written to stderr once somebody configures them."""

from __future__ import annotations

import logging
import os
import sys

from quire import envs

_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def set_default_level(level: str) -> None:
    """The level of quire's own handler unless QUIRE_LOG_LEVEL says otherwise."""
    if "QUIRE_LOG_LEVEL" not in os.environ:
        get_logger("quire").setLevel(level)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; the first call installs quire's handler unless the application has its own."""
    root = logging.getLogger("quire")
    if not root.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(envs.get("QUIRE_LOG_LEVEL"))
        root.propagate = False
    return logging.getLogger(name)
