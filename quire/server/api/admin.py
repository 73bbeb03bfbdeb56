"""Routes about the server itself: health, models, metrics, tokens."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from quire import __version__
from quire.engine.async_llm_engine import EngineState
from quire.errors import shown
from quire.observability import finished
from quire.observability.flight_recorder import NUM_STEPS
from quire.observability.prometheus import CONTENT_TYPE
from quire.server.api.output_form import FORMATS
from quire.server.api.params import check_fields
from quire.server.api.prompts import chat_text
from quire.server.api.protocol.openai import (
    ChromeTrace,
    ConversationFields,
    DetokenizeRequest,
    EngineStatus,
    FinishedReport,
    ModelCard,
    ModelList,
    Text,
    TokenizeRequest,
    Tokens,
)
from quire.server.api.trace import TraceReply
from quire.server.http.body import strict_route
from quire.server.http.errors import ApiError, invalid
from quire.server.http.replies import reply_of
from quire.server.http.streaming import json_reply, unless_gone
from quire.server.service import Service, context_of
from quire.structured.backend import BACKENDS
from quire.structured.json_schema import KEPT
from quire.structured.params import KINDS
from quire.tokenizer.vocabulary import has_vocabulary

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""What /v1/capabilities gives the defaults of."""
MAX_FINISHED = 1000
"""Requests of one page of those that have finished."""
MAX_CURSOR = 64
MAX_LISTED = 1000
"""Names of models that Anthropic's clients may ask for."""


def routes(service: Service) -> APIRouter:
    """Everything that generates nothing."""
    router = APIRouter(route_class=strict_route(service))
    _add_state(router, service)
    _add_models(router, service)
    _add_tokens(router, service)
    return router


def check_ready(service: Service) -> None:
    """Refuse while no request would be served.

    Raises: ApiError 503 that says in which stage of its start the core is.
    """
    engine = service.engine
    state = engine.state
    if state is not EngineState.READY:
        is_coming = state in (EngineState.STARTING, EngineState.RESTARTING)
        stage = f" (stage: {engine.stage})" if is_coming and engine.stage else ""
        raise ApiError(503, "engine_unavailable", f"The engine is {state.value}{stage}.", headers={"Retry-After": "1"})


def _add_state(router: APIRouter, service: Service) -> None:
    @router.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while the server lives: also while it starts, drains, or replaces its core within the time it has for
        that; 503 once there will be no core any more."""
        if service.engine.state is EngineState.DEAD:
            raise ApiError(503, "engine_unavailable", "The engine has stopped and will not come back.")
        return Response()

    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """200 while a request would be served now; otherwise the body says in which stage of its start the core is."""
        check_ready(service)
        return Response()

    router.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of quire."""
        return {"version": __version__}

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Requests in progress; and of the front that answers, work that waits or runs, and bytes of bodies."""
        return {
            "server_load": service.peers.counts.in_progress(),
            "queued_work": service.work.num_waiting,
            "running_work": service.work.num_running,
            "body_bytes": service.body_budget.used,
        }

    @router.get("/v1/stats", response_model=EngineStatus)
    async def stats(
        request: Request,
        activity: bool = False,
        finished_since: Annotated[
            str | None, Query(max_length=MAX_CURSOR, description="A cursor of an earlier reply, or empty: from now on.")
        ] = None,
    ) -> Response:
        """What the engine does now; the difference of two replies is what it did in between. With `activity=true` also
        how far each request of this API key is; other keys' requests are only counted. With `finished_since` also when
        requests came that have finished since, and how long they were: those of all keys."""
        engine = service.engine
        server, _ = await service.reports()
        status: EngineStatus = {
            "state": engine.state.value,
            "num_restarts": server.num_restarts,
            "num_requests": server.num_unfinished,
            "num_queued": server.num_queued,
            "num_sequences": service.peers.counts.num_sequences(),
            "num_tasks": len(asyncio.all_tasks()),
            "age_s": time.monotonic() - engine.last_stats_at if engine.last_stats else None,
            "stats": server.stats,
        }
        if activity:
            status["activity"] = await service.activity.of(context_of(request.scope).engine_tenant)
        if finished_since is not None:
            status["finished"] = _finished(await engine.finished_requests(), finished_since)
        return json_reply(status)

    @router.get("/v1/trace", response_model=ChromeTrace)
    async def trace(
        request: Request,
        steps: Annotated[int, Query(ge=1, le=NUM_STEPS, description="How many of the last steps to show.")] = NUM_STEPS,
    ) -> Response:
        """The last steps and requests in the format of Chrome's traces, which ui.perfetto.dev opens."""
        return TraceReply(request, service, steps)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        server, others = await service.reports()
        service.metrics.sequences.set(service.peers.counts.num_sequences())
        text = service.metrics.expose(server.stats, server.num_restarts, others)
        return Response(text, media_type=CONTENT_TYPE)


def _finished(memory: bytes, cursor: str) -> FinishedReport:
    try:
        page = finished.finished_since(memory, cursor, MAX_FINISHED)
    except ValueError as error:
        raise invalid("finished_since", f"finished_since is {shown(cursor)}: {error}.") from None
    return {
        "cursor": page.cursor,
        "now_s": page.now,
        "num_missed": page.num_missed,
        "requests": [
            {
                "arrived_s": request.arrived_at,
                "prompt_tokens": request.num_prompt_tokens,
                "cached_tokens": request.num_cached_tokens,
                "output_tokens": request.num_output_tokens,
                "n": request.num_branches,
                "outcome": request.outcome.name.lower(),
            }
            for request in page.requests
        ],
    }


def _add_models(router: APIRouter, service: Service) -> None:
    @router.get("/v1/models", response_model=ModelList)
    async def list_models(
        limit: Annotated[int | None, Query(ge=1, le=MAX_LISTED, description="Show no more names.")] = None,
    ) -> Response:
        """The names under which the model is served."""
        return json_reply({"object": "list", "data": [_card(service, name) for name in service.names[:limit]]})

    @router.get("/v1/models/{model:path}", response_model=ModelCard)
    async def show_model(model: str) -> Response:
        """One of them."""
        return json_reply(_card(service, service.check_model(model)))

    @router.get("/v1/capabilities")
    async def capabilities() -> dict[str, Any]:
        """What this server can do, and what it refuses by name."""
        config = service.engine.config
        return {
            "model": service.names[0],
            "max_model_len": config.model_config.max_model_len,
            "max_logprobs": config.model_config.max_logprobs,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "prefix_caching": config.cache_config.enable_prefix_caching,
            "chat": service.engine.tokenizer is not None and bool(service.engine.tokenizer.chat_templates),
            "tools": service.reads_calls,
            "reasoning": service.reads_thinking,
            "structured_output": _forms(service),
            "images": False,
            "embeddings": False,
            "adapters": False,
            "sampling_defaults": {name: getattr(service.engine.default_params, name) for name in SAMPLING_FIELDS},
            "same_request_same_tokens": service.engine.config.row_invariant,
        }


def _forms(service: Service) -> dict[str, Any] | bool:
    """What outputs can be made to follow; False where this model's tokenizer does not allow it."""
    if not has_vocabulary(service.engine.tokenizer, service.engine.config.model_config.eos_token_ids):
        return False
    return {
        "structured_outputs": list(KINDS),
        "response_format": list(FORMATS),
        "backends": list(BACKENDS),
        "json_schema_keywords": sorted(KEPT),
    }


def _card(service: Service, name: str) -> ModelCard:
    limit = service.engine.config.model_config.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "quire",
        "root": service.names[0],
        "parent": None,
        "max_model_len": limit,
        "context_length": limit,
        "context_window": limit,
        "max_input_tokens": limit,
        "permission": [],
    }


def _add_tokens(router: APIRouter, service: Service) -> None:
    def tokenized(body: TokenizeRequest) -> dict[str, Any]:
        warnings = check_fields(body, service)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "Give either prompt or messages.", "missing_required_parameter")
        if body.messages is not None:
            if body.add_special_tokens:
                raise invalid("add_special_tokens", "add_special_tokens is for prompt; a chat template writes its own.")
            _, ids, more = chat_text(service, body.messages, body)
            warnings += more
        else:
            fields = [name for name in ConversationFields.model_fields if getattr(body, name) is not None]
            warnings += [f"{name} has no effect: it is for messages" for name in fields]
            special = body.add_special_tokens is not False
            ids = service.engine.input_processor.encode(body.prompt or "", add_special_tokens=special)
        strings = [service.tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
        limit = service.engine.config.model_config.max_model_len
        reply = {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}
        return {**reply, "warnings": warnings} if warnings else reply

    def detokenized(body: DetokenizeRequest) -> dict[str, Any]:
        limit = service.engine.config.model_config.arch.vocab_size
        wrong = next((token_id for token_id in body.tokens if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise invalid("tokens", f"tokens holds {shown(wrong)}; this model's token ids are 0 to {limit - 1}.")
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @router.post("/tokenize", response_model=Tokens)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """The token ids of a prompt or of a conversation."""
        service.check_model(body.model, is_given=body.model is not None)
        reply = await unless_gone(request, service.settings, service.work.run(tokenized, body))
        return await reply_of(service.work, lambda: reply, reply["count"])

    @router.post("/detokenize", response_model=Text)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids."""
        service.check_model(body.model, is_given=body.model is not None)
        warnings = check_fields(body, service)
        reply = await unless_gone(request, service.settings, service.work.run(detokenized, body))
        return json_reply({**reply, "warnings": warnings} if warnings else reply)
