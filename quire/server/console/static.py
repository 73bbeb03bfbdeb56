"""Files for browsers: what they may load and do, and that they need not load again what has not changed."""

from __future__ import annotations

import hashlib

from fastapi import APIRouter, Request
from starlette.responses import Response

MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def policy(**more: str) -> str:
    """A Content-Security-Policy that allows this server's own files alone, with further rules or other values."""
    rules = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def add_file(router: APIRouter, path: str, name: str, content: bytes, rules: str) -> None:
    """Serve a file at a path under a policy; its name says what kind of file it is."""
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": rules,
        "Cross-Origin-Opener-Policy": "same-origin",
        "ETag": tag,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }

    @router.get(path, include_in_schema=False)
    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=MEDIA_TYPES[name.rpartition(".")[2]])
