"""POST /v1/responses: OpenAI's newer API, translated onto the path of chat completions. Nothing is stored."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.api.chat import Conversation, converse
from quire.server.api.generation import Generation
from quire.server.api.logprobs import ChatLogprobsWriter, num_new
from quire.server.api.output_form import Form, openai_form
from quire.server.api.params import REFUSED, Refusal, check_fields, sampling_params
from quire.server.api.protocol.openai import ConversationFields
from quire.server.api.protocol.responses import ResponseReply, ResponsesRequest, ResponseUsage
from quire.server.http.body import strict_route
from quire.server.http.errors import ApiError, ErrorShape, invalid
from quire.server.http.replies import Encode, piece_of
from quire.server.http.streaming import STREAMED, EventStream, encode, event, unless_gone
from quire.server.service import Context, Service, context_of

LOGPROBS = "message.output_text.logprobs"
OF_ITEMS = ("type", "id", "status")
_NO_STORE = Refusal("responses are not stored; send the whole conversation as input")
_REFUSED = {
    **REFUSED,
    "background": Refusal("requests are answered while the client waits", (False,)),
    "conversation": _NO_STORE,
    "max_tool_calls": REFUSED["tools"],
    "previous_response_id": _NO_STORE,
    "prompt": Refusal("prompt templates are not stored; send input and instructions"),
    "tool_choice": Refusal(REFUSED["tool_choice"].why, ("none", "auto")),
    "tools": Refusal(REFUSED["tools"].why, ([],)),
    "truncation": Refusal("an input that is too long is refused, never cut", ("disabled",)),
}


def routes(service: Service) -> APIRouter:
    """The route of responses."""
    router = APIRouter(route_class=strict_route(service))

    @router.post("/v1/responses", response_model=ResponseReply, responses=STREAMED)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input."""
        model = service.check_model(body.model, is_given="model" in body.model_fields_set)
        reply = _Reply(service, context_of(request.scope), body, model)
        if body.stream:
            return EventStream(reply.stream(), service.settings, end=b"", error=reply.error_event)
        return await unless_gone(request, service.settings, reply.whole())

    return router


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as a conversation.

    Raises: ApiError for items other than messages.
    """
    system = [] if not body.instructions else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*system, {"role": "user", "content": body.input}]
    if not body.input:
        raise invalid("input", "input must contain at least 1 item.")
    for index, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind != "message":
            place = f"input[{index}].type"
            raise invalid(place, f"{place} {str(kind)[:64]!r} is not supported; send messages.", "unsupported_content")
    return [*system, *map(_message, body.input)]


def _message(item: dict[str, Any]) -> dict[str, Any]:
    """An item as the chat template sees it; what only the API itself gives a message is left out."""
    return {"content": None, **{name: value for name, value in item.items() if name not in OF_ITEMS}}


class _Reply:
    """The reply to one request, whole or as a stream."""

    def __init__(self, service: Service, context: Context, body: ResponsesRequest, model: str) -> None:
        self._service = service
        self._context = context
        self._body = body
        self._model = model
        self._item_id = f"msg_{context.id}"
        self._numbers = itertools.count()
        self._warnings = [*check_fields(body, service, refused=_REFUSED), *self._check()]
        self._logprobs = ChatLogprobsWriter(service.engine.tokenizer, body.top_logprobs or 0, as_ids=False)

    async def whole(self) -> Response:
        """The reply that comes at once."""
        conversation = await self._prepare(stream=False)
        return await conversation.answer(self._service.work, self._reply)

    def _reply(self, conversation: Conversation, output: RequestOutput, extras: dict[str, Any]) -> dict[str, Any]:
        params = conversation.params
        (completion,) = output.outputs
        logprobs = self._written(completion)
        warnings = [*self._warnings, *conversation.warnings, *output.warnings]
        response = self._response(params, conversation.generation, completion, completion.text, logprobs, warnings)
        return {**response, **extras}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the reply."""
        conversation = await self._prepare(stream=True)
        params, generation = conversation.params, conversation.generation
        text, logprobs = "", list[Any]()
        warnings: list[str] = []
        num_numbers = 0
        begun = False
        async with aclosing(generation.stream()) as outputs:
            async for _, output in outputs:
                (completion,) = output.outputs
                if not begun:
                    begun = True
                    warnings = [*self._warnings, *conversation.warnings, *output.warnings]
                    yield self._start(params, warnings)
                text += completion.text
                num_numbers += num_new(completion)
                if completion.text or completion.logprobs:
                    write = partial(self._delta, completion, logprobs)
                    yield await piece_of(self._service.work, write, num_new(completion))
        response = self._response(params, generation, completion, text, logprobs, warnings)
        response.update(await generation.extras())
        size = num_numbers + generation.size_of_extras
        yield await piece_of(self._service.work, partial(self._end, response, logprobs), size)

    def error_event(self, error: ApiError, _: ErrorShape) -> bytes:
        """An error in a stream that has begun."""
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})

    def _start(self, params: SamplingParams, warnings: list[str]) -> bytes:
        response = self._response(params, None, None, "", [], warnings)
        item = {**self._item("", []), "status": "in_progress", "content": []}
        return b"".join(
            (
                self._event("response.created", {"response": response}),
                self._event("response.in_progress", {"response": response}),
                self._event("response.output_item.added", {"output_index": 0, "item": item}),
                self._event("response.content_part.added", {**self._place, "part": _part("", [])}),
            )
        )

    def _delta(self, completion: CompletionOutput, logprobs: list[Any], write: Encode) -> bytes:
        """The next piece of the text; its logprobs are added to the others. Mutates logprobs."""
        new = self._written(completion)
        logprobs += new
        fields = {**self._place, "delta": completion.text, "logprobs": new}
        return self._event("response.output_text.delta", fields, write)

    def _end(self, response: dict[str, Any], logprobs: list[Any], write: Encode) -> bytes:
        """The last events, each of which says all again; logprobs are written once. Mutates response."""
        (item,) = response["output"]
        (part,) = item["content"]
        part["logprobs"] = written = msgspec.Raw(write(logprobs))
        return b"".join(
            (
                self._event("response.output_text.done", {**self._place, "text": part["text"], "logprobs": written}),
                self._event("response.content_part.done", {**self._place, "part": part}),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event(f"response.{response['status']}", {"response": response}),
            )
        )

    def _event(self, kind: str, fields: dict[str, Any], write: Encode = encode) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind, write)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    async def _prepare(self, *, stream: bool) -> Conversation:
        body = self._body
        wanted = LOGPROBS in (body.include or ())
        make_params = partial(
            sampling_params,
            self._service,
            body,
            max_tokens=body.max_output_tokens,
            stream=stream,
            logprobs=(body.top_logprobs or 0) if wanted else None,
            form=self._form(),
        )
        fields = ConversationFields(chat_template_kwargs=body.chat_template_kwargs, reasoning_effort=self._effort)
        return await converse(
            self._service,
            self._context,
            _messages(body),
            make_params,
            fields=fields,
            salt=body.cache_salt,
            priority=body.priority,
        )

    def _check(self) -> list[str]:
        """Warnings about fields that are known here but hold what is not.

        Raises: ApiError.
        """
        body = self._body
        warnings = [f"include {name[:64]!r} has no effect" for name in body.include or () if name != LOGPROBS]
        if body.store:
            warnings.append("store has no effect: responses are not stored")
        if body.top_logprobs and LOGPROBS not in (body.include or ()):
            raise invalid("top_logprobs", f"top_logprobs requires {LOGPROBS!r} in include.")
        return warnings

    def _form(self) -> Form | None:
        body = self._body
        form = (
            None
            if body.text is None or body.text.format is None
            else openai_form(body.text.format, "text.format", is_flat=True)
        )
        if form is not None and body.structured_outputs is not None:
            raise invalid("text.format", "text.format and structured_outputs both say what the output is; send one.")
        return form

    @property
    def _effort(self) -> str | None:
        return None if self._body.reasoning is None else self._body.reasoning.effort

    def _written(self, completion: CompletionOutput) -> list[Any]:
        if completion.logprobs is None:
            return []
        return list(self._logprobs.write(completion.token_ids, completion.logprobs)["content"])

    def _item(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item_id,
            "status": "completed",
            "role": "assistant",
            "content": [_part(text, logprobs)],
        }

    def _response(
        self,
        params: SamplingParams,
        generation: Generation | None,
        completion: CompletionOutput | None,
        text: str,
        logprobs: list[Any],
        warnings: list[str],
    ) -> dict[str, Any]:
        """The response object: in progress without a completion, else at its end."""
        body = self._body
        cut = completion is not None and completion.finish_reason == "length"
        status = "in_progress" if completion is None else "incomplete" if cut else "completed"
        item = {**self._item(text, logprobs), "status": status}
        response = {
            "id": f"resp_{body.request_id or self._context.id}",
            "object": "response",
            "created_at": self._context.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [] if completion is None else [item],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": self._effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if generation is None else _usage(generation),
        }
        return {**response, "warnings": warnings} if warnings else response


def _part(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(generation: Generation) -> ResponseUsage:
    return {
        "input_tokens": generation.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "output_tokens": generation.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": generation.num_prompt_tokens + generation.num_output_tokens,
    }
