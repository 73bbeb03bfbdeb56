"""POST /v1/messages: Anthropic's API, translated onto the path of chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.errors import shown
from quire.message_formats.parts import Part, Reasoning
from quire.outputs import CompletionOutput, RequestOutput
from quire.server.api.anthropic_messages import Messages, blocks_of, delta_of, opened, tools_of
from quire.server.api.chat import Conversation, converse
from quire.server.api.constraints import form_beside
from quire.server.api.generation import Generation
from quire.server.api.message_reader import MessageReader, check_thinks, thinking_kwargs, thinks_anyway
from quire.server.api.output_form import Form, anthropic_form
from quire.server.api.params import ONE_ANSWER, REFUSED, Refusal, check_fields, sampling_params
from quire.server.api.prompts import chat_text
from quire.server.api.protocol.anthropic import (
    AnthropicError,
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    MessageUsage,
    TokenCount,
)
from quire.server.api.protocol.openai import ConversationFields
from quire.server.api.unknown_fields import OF_SCHEMA, warn_of
from quire.server.http.body import strict_route
from quire.server.http.errors import invalid
from quire.server.http.replies import Encode, piece_of
from quire.server.http.streaming import STREAMED, EventStream, encode, event, json_reply, unless_gone
from quire.server.service import Context, Service, context_of
from quire.tokenizer.unread_fields import Unknown, unknown_in

_NAMES = {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}
"""What the other APIs call a field -> what this one does."""
_NO_TOOLS = Refusal("tools are run by the client that offers them")
_REFUSED = {
    **REFUSED,
    "container": _NO_TOOLS,
    "mcp_servers": _NO_TOOLS,
    "n": ONE_ANSWER,
}
_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": AnthropicError}, "5XX": {"model": AnthropicError}}


def routes(service: Service) -> APIRouter:
    """The routes of Anthropic's API."""
    router = APIRouter(route_class=strict_route(service), responses=_ERRORS)

    @router.post("/v1/messages", response_model=MessageReply, responses=STREAMED)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        model = service.check_model(body.model, is_given="model" in body.model_fields_set)
        reply = _Reply(service, context_of(request.scope), body, model)
        if body.stream:
            return EventStream(reply.stream(), service.settings, end=b"")
        return await unless_gone(request, service.settings, reply.whole())

    @router.post("/v1/messages/count_tokens", response_model=TokenCount)
    async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
        """The tokens that a conversation has as a prompt."""
        service.check_model(body.model, is_given="model" in body.model_fields_set)
        warnings = check_fields(body, service, refused=_REFUSED)
        work = service.work.run(_prompt_of, service, body)
        _, ids, more = await unless_gone(request, service.settings, work)
        reply: dict[str, Any] = {"input_tokens": len(ids)}
        return json_reply({**reply, "warnings": [*warnings, *more]} if warnings or more else reply)

    return router


def _fields(service: Service, body: CountTokensRequest) -> ConversationFields:
    """A last message of the assistant's is one to go on with."""
    continues = bool(body.messages) and body.messages[-1].get("role") == "assistant"
    kwargs = {**thinking_kwargs(service, _thinks(service, body)), **(body.chat_template_kwargs or {})}
    effort = None if body.output_config is None else body.output_config.effort
    return ConversationFields(
        continue_final_message=continues, chat_template_kwargs=kwargs or None, reasoning_effort=effort
    )


def _thinks(service: Service, body: CountTokensRequest) -> bool | None:
    """Whether the model shall think; None leaves it to the chat template.

    Raises: ApiError.
    """
    kind = None if body.thinking is None else body.thinking.type
    if kind not in (None, "adaptive", "disabled", "enabled"):
        raise invalid("thinking.type", f"thinking.type must be enabled, adaptive or disabled; got {shown(kind)}.")
    if kind == "enabled":
        check_thinks(service, "thinking")
    return None if kind in (None, "adaptive") else kind == "enabled"


def _prompt_of(service: Service, body: CountTokensRequest) -> tuple[str, list[int], list[str]]:
    """What `chat_text` gives for a request that would be served. Its sampling parameters have no part in it, but wrong
    ones are refused as they are where they count."""
    sampling_params(service, body, max_tokens=1, stream=False)
    for place, form in _forms(body):
        anthropic_form(form, place)
    messages, tools = Messages(body), tools_of(body)
    unknown = warn_of([*_unknown_in_forms(body), *tools.unknown, *messages.unknown], service)
    with messages.named():
        text, ids, warnings = chat_text(
            service, messages.messages, _fields(service, body), tools, place_of=messages.place_of
        )
    return text, ids, [*unknown, *warnings]


class _Reply:
    """The reply to one request, whole or as a stream."""

    def __init__(self, service: Service, context: Context, body: MessagesRequest, model: str) -> None:
        self._service = service
        self._context = context
        self._body = body
        self._head = {
            "id": f"msg_{body.request_id or context.id}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._warnings = check_fields(body, service, refused=_REFUSED)
        self._warnings += warn_of(_unknown_in_forms(body), service)
        self._tools = tools_of(body)
        if body.thinking is not None and body.thinking.type != "enabled" and body.thinking.budget_tokens is not None:
            self._warnings.append(f"thinking.budget_tokens has no effect with the type {shown(body.thinking.type)}")
        self._shows_thinking = body.thinking is None or body.thinking.type != "disabled"
        if body.stop is not None and body.stop_sequences is not None:
            raise invalid("stop", "stop and stop_sequences mean the same; give one of them.")

    async def whole(self) -> Response:
        """The reply that comes at once."""
        conversation = await self._prepare(stream=False)
        return await conversation.answer(self._service.work, self._reply)

    def _reply(self, conversation: Conversation, output: RequestOutput, extras: dict[str, Any]) -> dict[str, Any]:
        (completion,) = output.outputs
        parts, finish_reason = conversation.read(completion)
        reply = {
            **self._head,
            "content": blocks_of(self._shown(parts)),
            **_end(completion, finish_reason),
            "usage": _usage(conversation.generation),
            **extras,
        }
        warnings = [*self._warnings, *conversation.warnings, *output.warnings]
        return {**reply, "warnings": warnings} if warnings else reply

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the reply."""
        conversation = await self._prepare(stream=True)
        generation = conversation.generation
        blocks: _Blocks | None = None
        reader = MessageReader(conversation.reading, 0)
        async with aclosing(generation.stream()) as outputs:
            async for _, output in outputs:
                (completion,) = output.outputs
                if blocks is None:
                    blocks = _Blocks()
                    yield self._start(generation, [*self._warnings, *conversation.warnings, *output.warnings])
                for piece in blocks.take(self._shown(reader.take(completion))):
                    yield piece
        assert blocks is not None
        yield blocks.end()
        ended = _end(completion, reader.finish_reason(completion))
        end = {"delta": ended, "usage": _usage(generation), **await generation.extras()}
        yield await piece_of(self._service.work, partial(_event, "message_delta", end), generation.size_of_extras)
        yield _event("message_stop", {})

    def _shown(self, parts: list[Part]) -> list[Part]:
        """Without the thinking, for a client that wants none."""
        if self._shows_thinking:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def _start(self, generation: Generation, warnings: list[str]) -> bytes:
        usage = {**_usage(generation), "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        if warnings:
            message["warnings"] = warnings
        return _event("message_start", {"message": message})

    def _form(self) -> Form | None:
        """Both fields that Anthropic has had for it.

        Raises: ApiError.
        """
        body = self._body
        form = next((form for place, given in _forms(body) if (form := anthropic_form(given, place))), None)
        if form is not None and body.structured_outputs is not None:
            raise invalid(form.place, f"{form.place} and structured_outputs both say what the output is; send one.")
        return form

    def _translated(self) -> dict[str, Any]:
        """Fields under the names that all APIs share here.

        Raises: ApiError.
        """
        body = self._body
        found: dict[str, Any] = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
        budget = None if body.thinking is None else body.thinking.budget_tokens
        if budget is None or body.thinking is None or body.thinking.type != "enabled":
            return found
        if budget < 1:
            raise invalid("thinking.budget_tokens", f"thinking.budget_tokens must be at least 1, got {budget}.")
        return {**found, "thinking_token_budget": budget}

    async def _prepare(self, *, stream: bool) -> Conversation:
        body = self._body
        translated = self._translated()
        fields = body.model_copy(update=translated)
        form, warnings = form_beside(self._tools, self._form())
        self._warnings += warnings
        make_params = partial(
            sampling_params, self._service, fields, max_tokens=body.max_tokens, stream=stream, form=form
        )
        messages = await self._service.work.run(Messages, body)
        self._warnings += warn_of(messages.unknown, self._service)
        self._warnings += thinks_anyway(self._service, _thinks(self._service, body), "thinking.type disabled")
        with messages.named():
            return await converse(
                self._service,
                self._context,
                messages.messages,
                make_params,
                fields=_fields(self._service, body),
                salt=body.cache_salt,
                priority=body.priority,
                tools=self._tools,
                place_of=messages.place_of,
                names={name: _NAMES[name] for name in translated},
            )


def _forms(body: CountTokensRequest) -> list[tuple[str, Any]]:
    in_config = None if body.output_config is None else body.output_config.format
    return [("output_config.format", in_config), ("output_format", body.output_format)]


def _unknown_in_forms(body: CountTokensRequest) -> list[Unknown]:
    return [field for place, form in _forms(body) for field in unknown_in(form, place, ("type", *OF_SCHEMA))]


def _event(kind: str, fields: dict[str, Any], write: Encode = encode) -> bytes:
    return event({"type": kind, **fields}, kind, write)


class _Blocks:
    """The blocks of a stream: each is opened by the first part of its kind, and closed by the next block."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def take(self, parts: list[Part]) -> list[bytes]:
        """The events of the next parts."""
        events = []
        for part in parts:
            kind, block = opened(part)
            if block is not None and (kind != self._kind or kind == "tool_use"):
                events.append(self._open(kind, block))
            delta = delta_of(part)
            if delta is not None:
                events.append(_event("content_block_delta", {"index": self._index, "delta": delta}))
        return events

    def end(self) -> bytes:
        """The end of the last block; a message has one at least."""
        begun = b"" if self._kind else self._open("text", {"type": "text", "text": ""})
        return begun + self._close()

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close() if self._kind else b""
        self._index, self._kind = self._index + 1, kind
        return closed + _event("content_block_start", {"index": self._index, "content_block": block})

    def _close(self) -> bytes:
        return _event("content_block_stop", {"index": self._index})


def _end(completion: CompletionOutput, finish_reason: str | None) -> dict[str, str | None]:
    if finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(generation: Generation) -> MessageUsage:
    return {
        "input_tokens": generation.num_prompt_tokens - generation.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.num_cached_tokens,
        "output_tokens": generation.num_output_tokens,
    }
