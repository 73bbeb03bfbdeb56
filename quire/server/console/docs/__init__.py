"""`/docs`: every route with its fields, shown by Swagger UI from files of this server, so that it works offline.

Behind the API key where there is one, as `/openapi.json` is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from quire.server.console.static import add_file, policy
from quire.server.http.replies import SMALL_REPLY, reply_of
from quire.utils.work_pool import WorkPool

PAGE = "index.html"
FILES = ("docs.js", "swagger-ui-bundle.js", "swagger-ui.css")

POLICY = policy(img_src="'self' data:")
"""Swagger UI has its icons as data URLs in its style sheet. It writes markup itself, so this page cannot have the
console's Trusted Types; scripts of others, and inline ones, are refused all the same."""


def routes(work: WorkPool, describe: Callable[[str], dict[str, Any]]) -> APIRouter:
    """The page at `/docs`, what it loads below it, and `/redoc`, which leads there; and `/openapi.json`, which `work`
    makes of what `describe` says about the routes under a path."""
    router = APIRouter()
    folder = resources.files(__name__)
    add_file(router, "/docs", PAGE, folder.joinpath(PAGE).read_bytes(), POLICY)
    for name in FILES:
        add_file(router, f"/docs/{name}", name, folder.joinpath(name).read_bytes(), POLICY)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi(request: Request) -> Response:
        root_path = request.scope.get("root_path", "").rstrip("/")
        return await reply_of(work, partial(describe, root_path), size=SMALL_REPLY + 1)

    @router.get("/redoc", include_in_schema=False)
    async def redoc() -> Response:
        return RedirectResponse("docs")

    return router
