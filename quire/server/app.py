"""`create_app`: the server as an ASGI application, over an engine that somebody else starts and stops."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from quire import __version__
from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.errors import QuireError
from quire.server import console
from quire.server.api import admin, anthropic, chat, completions, ollama
from quire.server.api.errors import error_shape
from quire.server.api.protocol.openai import Error
from quire.server.api.responses import routes as responses
from quire.server.console import docs
from quire.server.http.errors import ApiError, ErrorShapes, as_api_error, error_response, route_of
from quire.server.http.middleware import Authentication, Limits, RequestContext
from quire.server.processes.peers import Peers
from quire.server.service import Service
from quire.server.settings import ServerSettings
from quire.utils import garbage

_POOLING = "quire generates text; embeddings, scores and classes need another server."
_LORA = "there are no adapters; merge them into the checkpoint."
_MEDIA = "models take and write text only."
NOT_BUILT = {
    **dict.fromkeys(
        ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/v1/pooling"), _POOLING
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/v1/classify"), _POOLING),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/fine_tuning"), _LORA),
    **dict.fromkeys(("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"), _MEDIA),
    "/v1/moderations": "the model can be asked with /v1/chat/completions.",
    "/v1/batches": "`quire run-batch` answers a file of requests.",
    "/v1/files": "`quire run-batch` reads and writes files.",
    "/v1/messages/batches": "`quire run-batch` answers a file of requests.",
    **dict.fromkeys(
        ("/v1/assistants", "/v1/conversations", "/v1/threads"),
        "/v1/responses and /v1/chat/completions hold conversations.",
    ),
    "/v1/responses/compact": "send a shorter conversation.",
    "/v1/responses/input_tokens": "/tokenize counts the tokens of messages.",
    **dict.fromkeys(("/completion", "/completions"), "use /v1/completions; n_predict is called max_tokens there."),
    **dict.fromkeys(("/embedding", "/embeddings", "/reranking"), _POOLING),
    "/apply-template": "/tokenize takes messages and gives their token ids; /detokenize gives the text.",
    "/chat/completions": "use /v1/chat/completions.",
    "/infill": "write the prompt in the model's own fill-in-the-middle form, for /v1/completions.",
    "/lora-adapters": _LORA,
    "/models": "use /v1/models.",
    "/props": "/v1/models and /version describe the model and the server.",
    "/slots": "/load and /v1/stats say what runs. There are no slots to choose: all prompts share the prefix cache.",
    "/collective_rpc": "there are no workers to call.",
    "/is_sleeping": "there is no sleep; /ready says whether requests are served.",
    "/server_info": "/v1/models, /version and /v1/stats describe the server.",
    **dict.fromkeys(("/start_profile", "/stop_profile"), "a request with x-quire-why: 1 is told where its time went."),
    "/sleep": "stop the server instead; it is ready again within seconds.",
    "/wake_up": "there is no sleep; a server starts within seconds.",
}
"""Routes of OpenAI, vLLM and llama.cpp that quire does not have, and what to do instead."""
MANY_BYTES = 1 << 20
"""Of bodies in progress: a collection would look at all that was read from them."""
MAX_COMPARED = 128
"""Characters of a path that is compared with those of all routes."""
ROUTES = (completions.routes, chat.routes, responses.routes, anthropic.routes, ollama.routes, admin.routes)


def create_app(engine: AsyncLLMEngine, settings: ServerSettings | None = None, peers: Peers | None = None) -> FastAPI:
    """The application. The engine may still be starting: until it is ready, requests are answered with 503."""
    settings = ServerSettings() if settings is None else settings
    service = Service(engine, settings, peers)
    engine.when_configured(service.describe_conversations)
    hidden = settings.disable_fastapi_docs

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        _build_routes(app)
        collector = asyncio.create_task(garbage.collect_now_and_then(lambda: service.body_budget.used > MANY_BYTES))
        # for the connections, which refuse before there is a request
        yield {"count_refused": service.count_refused, "error_shape": error_shape}
        collector.cancel()
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="quire",
        version=__version__,
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # and make their document on the event loop, which takes half a second
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry={"auto_configure": False},  # no exporter that an environment variable could switch on
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    describe = partial(_document, app)
    pages = [console.routes()] if hidden else [console.routes(), docs.routes(service.work, describe)]
    routers = [*(routes(service) for routes in ROUTES), *pages]
    for router in routers:
        app.include_router(router)
    app.state.paths = [route.path for route in _routes_of(routers) if route.include_in_schema]
    for kind in (HTTPException, RequestValidationError, QuireError, Exception):
        app.add_exception_handler(kind, _answer)
    app.add_middleware(Limits, service=service)
    app.add_middleware(Authentication, service=service)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    app.add_middleware(RequestContext, service=service)
    app.add_middleware(
        ErrorShapes, shape_of=error_shape, may_repeat_root_path=not _begins_routes(settings.root_path, routers)
    )
    return app


def _build_routes(app: FastAPI) -> None:
    """FastAPI builds what a route needs when a request is first compared with it: 60 ms, not the first client's."""
    nowhere = {"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []}
    for route in app.routes:
        route.matches({**nowhere, "app": app})


def _document(app: FastAPI, root_path: str) -> dict[str, Any]:
    """The routes in OpenAPI's form, under the path where a proxy serves them. Takes half a second the first time."""
    return {**app.openapi(), **({"servers": [{"url": root_path}]} if root_path else {})}


def _begins_routes(root_path: str, routers: list[APIRouter]) -> bool:
    """Whether the root path is the beginning of a route: then a path that begins with it says nothing about proxies."""
    root = root_path.rstrip("/")
    paths = [route.path for route in _routes_of(routers)]
    return any(path == root or path.startswith(f"{root}/") for path in paths)


def _routes_of(routers: list[APIRouter]) -> list[Route]:
    return [route for router in routers for route in router.routes if isinstance(route, Route)]


async def _answer(request: Request, error: Exception) -> Response:
    """Any exception as an error reply."""
    if isinstance(error, HTTPException) and not isinstance(error, ApiError):
        error = _unrouted(request, route_of(request.scope), error)
    return error_response(as_api_error(error), request.scope)


def _unrouted(request: Request, path: str, error: HTTPException) -> HTTPException:
    """What a route that does not exist is answered with: one of another engine's is not built, any other is unknown."""
    for prefix, why in NOT_BUILT.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return ApiError(404, "not_found", f"{prefix} is not built: {why}")
    if error.status_code == 405 and error.headers:
        allowed = f"Method Not Allowed: {path[:128]} takes {error.headers['Allow']}, not {request.method[:16]}."
        return ApiError(405, "method_not_allowed", allowed, headers=error.headers)
    if error.status_code != 404:
        return error
    near = difflib.get_close_matches(path, request.app.state.paths, n=1) if len(path) <= MAX_COMPARED else []
    hint = f" Did you mean {near[0]}?" if near else ""
    return ApiError(404, "not_found", f"Unknown route {request.method[:16]} {path[:128]!r}.{hint}")
