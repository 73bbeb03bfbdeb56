"""The console: a web page to talk with the model and to watch the engine.

Static files, served as they are and without a key: they hold nothing, and everything they show they ask for through
the API, with the key that the reader gives them. The policy allows no script, style or request but this server's own,
and no text to become markup. Conversations stay in the reader's browser.
"""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter

from quire.server.console.static import MEDIA_TYPES, add_file, policy

PAGE = "index.html"
VENDORED = "vendor"


def _files(folder: Traversable, prefix: str = "") -> dict[str, bytes]:
    """What browsers load, by its path below this folder."""
    found: dict[str, bytes] = {}
    for file in folder.iterdir():
        if file.is_dir() and (prefix or file.name == VENDORED):
            found |= _files(file, f"{prefix}{file.name}/")
        elif file.name.rpartition(".")[2] in MEDIA_TYPES:
            found[prefix + file.name] = file.read_bytes()
    return found


_FILES = _files(resources.files(__name__))
_ADDRESSES = {"/" if name == PAGE else f"/console/{name}": name for name in _FILES}

PATHS = frozenset(_ADDRESSES)
"""All that is served here."""
POLICY = policy(require_trusted_types_for="'script'", trusted_types="'none'")
"""Nothing that models, servers and people say can become markup: the browser refuses."""


def routes() -> APIRouter:
    """The page at `/`, and what it loads below `/console/`."""
    router = APIRouter()
    for path, name in _ADDRESSES.items():
        add_file(router, path, name, _FILES[name], POLICY)
    return router
