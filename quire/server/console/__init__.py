"""The console: a web page to talk with the model and to watch the engine.

Static files, served as they are and without a key: they hold nothing, and everything they show they ask for through
the API, with the key that the reader gives them. The policy allows no script, style or request but this server's own,
and no text to become markup.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import Response

PAGE = "index.html"
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def _files(folder: Traversable, prefix: str = "") -> dict[str, bytes]:
    """What browsers load, by its path below this folder."""
    found: dict[str, bytes] = {}
    for file in folder.iterdir():
        if file.is_dir():
            found |= _files(file, f"{prefix}{file.name}/")
        elif file.name.rpartition(".")[2] in _MEDIA_TYPES:
            found[prefix + file.name] = file.read_bytes()
    return found


_FILES = _files(resources.files(__name__))
_ADDRESSES = {"/" if name == PAGE else f"/console/{name}": name for name in _FILES}

PATHS = frozenset(_ADDRESSES)
"""All that is served here."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)


def routes() -> APIRouter:
    """The page at `/`, and what it loads below `/console/`."""
    router = APIRouter()
    for path, name in _ADDRESSES.items():
        _add_file(router, path, name)
    return router


def _add_file(router: APIRouter, path: str, name: str) -> None:
    content = _FILES[name]
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "ETag": tag,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @router.get(path, include_in_schema=False)
    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_MEDIA_TYPES[name.rpartition(".")[2]])
