"""Ollama's routes about models: the one that is served. Requests to manage models are refused with the reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire import __version__
from quire.config.memory.weights.shapes import num_parameters
from quire.errors import UnsupportedFeature
from quire.server.api.params import check_fields
from quire.server.api.protocol.ollama import ApiVersion, Details, Model, Models, OllamaError, Shown, ShowRequest
from quire.server.http.body import strict_route
from quire.server.http.errors import ApiError
from quire.server.http.streaming import json_reply
from quire.server.service import Service

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": OllamaError}, "5XX": {"model": OllamaError}}
API_VERSION = "0.12.0"
"""The version of Ollama whose API this is: clients compare it to find out what they may send."""
LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"
"""When the model is unloaded."""

_LEVELS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ONE_MODEL = "This server has one model, chosen at its start. Start a server with another one: quire serve MODEL."
_NO_EMBEDDINGS = "Embeddings are not supported yet. Use another server for them."
_UNBUILT = {
    ("POST", "/api/blobs/{digest}"): _ONE_MODEL,
    ("POST", "/api/copy"): f"{_ONE_MODEL} More names for a model: --served-model-name.",
    ("POST", "/api/create"): _ONE_MODEL,
    ("DELETE", "/api/delete"): _ONE_MODEL,
    ("POST", "/api/embed"): _NO_EMBEDDINGS,
    ("POST", "/api/embeddings"): _NO_EMBEDDINGS,
    ("POST", "/api/pull"): _ONE_MODEL,
    ("POST", "/api/push"): _ONE_MODEL,
}


def routes(service: Service) -> APIRouter:
    """Everything of Ollama's API that generates nothing."""
    router = APIRouter(route_class=strict_route(service, takes_any_type=True), responses=ERRORS)

    @router.head("/", include_in_schema=False)
    async def is_running() -> Response:
        """Ollama's command line asks this first. GET / is the console."""
        return Response()

    @router.get("/api/version", response_model=ApiVersion)
    async def version() -> Response:
        """The version of the API, and that of quire."""
        return json_reply({"version": API_VERSION, "quire": __version__})

    @router.get("/api/tags", response_model=Models)
    async def tags() -> Response:
        """The names under which the model is served."""
        made_at = _made_at(service)
        return json_reply({"models": [{**model, "modified_at": made_at} for model in _models(service)]})

    @router.get("/api/ps", response_model=Models)
    async def loaded() -> Response:
        """The same: the model is always loaded, in the memory of the machine."""
        more = {
            "expires_at": NEVER,
            "size_vram": 0,
            "context_length": service.engine.config.model_config.max_model_len,
        }
        return json_reply({"models": [{**model, **more} for model in _models(service)]})

    @router.post("/api/show", response_model=Shown)
    async def show(body: ShowRequest, request: Request) -> Response:
        """What there is to know about the model."""
        field = "model" if "model" in body.model_fields_set else "name"
        given = checked_model(service, getattr(body, field), is_given=field in body.model_fields_set)
        warnings = check_fields(body, service)
        if body.verbose:
            warnings.append("verbose has no effect: the tokens of the vocabulary are not listed")
        reply = _shown(service, given)
        return json_reply({**reply, "warnings": warnings} if warnings else reply)

    for (method, path), why in _UNBUILT.items():
        _add_unbuilt(router, method, path, why)
    return router


def _add_unbuilt(router: APIRouter, method: str, path: str, why: str) -> None:
    @router.api_route(path, methods=[method], include_in_schema=False)
    async def refuse() -> Response:
        raise ApiError(400, "unsupported_feature", f"{path.partition('/{')[0]} is not supported. {why}")


def checked_model(service: Service, given: str | None, *, is_given: bool) -> str:
    """The name to show in a reply: as given, with or without `:latest`.

    Raises: ApiError 404.
    """
    bare = given if given is None or given in service.names else given.removesuffix(LATEST)
    found = service.check_model(bare, is_given=is_given)
    return given or found


def _models(service: Service) -> list[Model]:
    size = service.engine.config.memory_plan["weights"]
    digest = service.engine.identity.digest.hex()
    names = [name if ":" in name.rpartition("/")[2] else name + LATEST for name in service.names]
    return [
        {"name": name, "model": name, "size": size, "digest": digest, "details": _details(service)} for name in names
    ]


def _details(service: Service) -> Details:
    config = service.engine.config
    arch = config.model_config.arch
    method = config.quant_config.name
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": arch.model_type,
        "families": [arch.model_type],
        "parameter_size": _in_words(num_parameters(arch)),
        "quantization_level": _LEVELS[config.model_config.dtype] if method is None else method.upper(),
    }


def _shown(service: Service, name: str) -> Shown:
    model = service.engine.config.model_config
    arch = model.arch
    kind = arch.model_type
    info = {
        "general.architecture": kind,
        "general.parameter_count": num_parameters(arch),
        f"{kind}.attention.head_count": arch.num_heads,
        f"{kind}.attention.head_count_kv": arch.num_kv_heads,
        f"{kind}.block_count": arch.num_layers,
        f"{kind}.context_length": model.max_model_len,
        f"{kind}.embedding_length": arch.hidden_size,
        f"{kind}.feed_forward_length": arch.intermediate_size,
        f"{kind}.vocab_size": arch.vocab_size,
    }
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(_parameters(model.generation_defaults)),
        "template": _template(service),
        "details": _details(service),
        "model_info": info,
        "capabilities": _capabilities(service),
        "modified_at": _made_at(service),
    }


def _parameters(defaults: Mapping[str, Any]) -> Iterator[str]:
    """Lines of a Modelfile: a list has one for each of its texts."""
    for option, value in defaults.items():
        for one in value if isinstance(value, list) else [value]:
            yield f"{option} {json.dumps(one) if isinstance(one, str) else one}"


def _capabilities(service: Service) -> list[str]:
    found = {"completion": True, "tools": service.reads_calls, "thinking": service.reads_thinking}
    return [name for name, has_it in found.items() if has_it]


def _template(service: Service) -> str:
    """The source of the chat template, in Jinja; Ollama's own form of a prompt without one."""
    try:
        return service.chat_template.source
    except UnsupportedFeature:
        return "{{ .Prompt }}"


def _made_at(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")


def _in_words(count: int) -> str:
    """A number of parameters as people say it: 7.2M, 0.6B."""
    return f"{count / 1e9:.1f}B" if count >= 1e8 else f"{count / 1e6:.1f}M"
