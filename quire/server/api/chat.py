"""POST /v1/chat/completions, and the one path on which conversations of every API are answered."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.message_formats.parts import CallArguments, CallStart, Message, Part, Reasoning, Text, ToolCall
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.api.constraints import constrained, form_beside
from quire.server.api.generation import Generation
from quire.server.api.logprobs import ChatLogprobsWriter, num_new, num_numbers, prompt_logprobs
from quire.server.api.message_reader import MessageReader, Reading, reading_of
from quire.server.api.output_form import form_of
from quire.server.api.params import (
    MAX_N,
    REFUSED,
    Refusal,
    branches,
    check_fields,
    check_stream,
    other_name,
    sampling_params,
    tokens_as_ids,
    usage_in_stream,
)
from quire.server.api.prompts import cache_salt, chat_text, check_repeated, finish_prompt
from quire.server.api.protocol.fields import GenerationFields
from quire.server.api.protocol.openai import ChatCompletion, ChatCompletionRequest, ConversationFields
from quire.server.api.tools import NO_TOOLS, ToolUse, openai_tools
from quire.server.api.unknown_fields import unknown_in_form, warn_of
from quire.server.http.body import strict_route
from quire.server.http.errors import fields_named, invalid
from quire.server.http.replies import Encode, piece_of, reply_of
from quire.server.http.streaming import STREAMED, Chunks, EventStream, unless_gone
from quire.server.service import Context, Service, context_of
from quire.utils.work_pool import WorkPool

_NAMES = {"logprobs": "top_logprobs"}
_REFUSED = {
    **REFUSED,
    "add_special_tokens": Refusal("the chat template writes special tokens itself", (False,)),
    "function_call": Refusal("it is an old name; send tool_choice", ("none",)),
    "functions": Refusal("it is an old name; send tools"),
    "max_output_tokens": other_name("max_completion_tokens"),
    "stop_sequences": other_name("stop"),
}


def routes(service: Service) -> APIRouter:
    """The route of chat completions."""
    router = APIRouter(route_class=strict_route(service))

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMED)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, in `n` ways."""
        given = "model" in body.model_fields_set
        reply = _Reply(service, context_of(request.scope), body, service.check_model(body.model, is_given=given))
        if body.stream:
            return EventStream(reply.stream(), service.settings)
        return await unless_gone(request, service.settings, reply.whole())

    return router


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation on its way to the engine."""

    generation: Generation
    params: SamplingParams
    text: str
    warnings: list[str]
    reading: Reading | None = None

    async def answer(
        self, work: WorkPool, build: Callable[[Conversation, RequestOutput, dict[str, Any]], Mapping[str, Any]]
    ) -> Response:
        """The reply that comes at once: what `build` makes of the output and of what the request wants beside it."""
        (output,) = await self.generation.outputs()
        extras = await self.generation.extras()
        size = num_numbers([output]) + self.generation.size_of_extras
        return await reply_of(work, partial(build, self, output, extras), size)

    def read(self, completion: CompletionOutput) -> tuple[list[Part], str | None]:
        """The parts of a finished answer, and why it ended."""
        reader = MessageReader(self.reading, completion.index)
        parts = reader.take(completion)
        self.generation.num_reasoning_tokens += reader.num_reasoning_tokens
        return parts, reader.finish_reason(completion)


async def converse(
    service: Service,
    context: Context,
    messages: Sequence[dict[str, Any]],
    make_params: Callable[[], SamplingParams],
    *,
    fields: ConversationFields,
    salt: str | None,
    priority: int | None = None,
    tools: ToolUse = NO_TOOLS,
    place_of: Callable[[str], str] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Conversation:
    """Render and tokenise a conversation, off the event loop, and make it ready to be generated.

    `place_of` makes a path in the messages one in the request; `names` are those that its API has for our fields.

    Raises: ApiError; RequestErrors.
    """

    def prepare() -> Conversation:
        unknown = warn_of(tools.unknown, service)
        params = make_params()
        text, ids, warnings = chat_text(service, messages, fields, tools, place_of=place_of)
        warnings = [*unknown, *warnings]
        cut = fields if isinstance(fields, GenerationFields) else None
        prompt = finish_prompt(service, text, ids, params, fields=cut, salt=cache_salt(context, salt))
        reading = reading_of(service, context.id, tools, params, prompt["prompt_token_ids"], text)
        if reading is not None:
            found = constrained(params, reading, service.engine.input_processor.grammars)
            params, reading, warnings = found.params, found.reading, [*warnings, *found.warnings]
        generation = Generation(service, context, [prompt], params, priority=priority)
        return Conversation(generation, params, text, warnings, reading)

    with fields_named(names):
        return await service.work.run(prepare)


class _Reply:
    """The reply to one request, whole or as a stream."""

    def __init__(self, service: Service, context: Context, body: ChatCompletionRequest, model: str) -> None:
        self._service = service
        self._context = context
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{body.request_id or context.id}",
            "object": "chat.completion",
            "created": context.created,
            "model": model,
            "system_fingerprint": service.fingerprint,
        }
        self._warnings = check_fields(body, service, refused=_REFUSED)
        if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
            self._warnings.append("max_tokens has no effect beside max_completion_tokens")
        self._warnings += warn_of(unknown_in_form(body.response_format, "response_format"), service)
        self._tools = openai_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        self._role = service.settings.response_role
        self._echo = self._echoed()
        if body.echo and not self._echo:
            self._warnings.append(f"echo has no effect: the last message is no text of the role {self._role!r}")
        self._logprobs = ChatLogprobsWriter(
            service.engine.tokenizer, body.top_logprobs or 0, as_ids=tokens_as_ids(body, service.settings)
        )
        check_stream(body)
        check_repeated(len(self._echo) * min(body.n or 1, MAX_N), "echo")
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "top_logprobs requires logprobs to be true.")
        if body.top_logprobs is not None and body.top_logprobs < -1:
            raise invalid("top_logprobs", f"top_logprobs must be between 0 and 20, got {body.top_logprobs}.")
        limit = service.engine.config.model_config.max_logprobs
        if (body.top_logprobs or 0) > limit:
            asked = f"top_logprobs={body.top_logprobs} asks for {body.top_logprobs} candidates per position"
            raise invalid("top_logprobs", f"{asked}, the limit is {limit}; lower it or start with --max-logprobs.")

    async def whole(self) -> Response:
        """The reply that comes at once."""
        conversation = await self._prepare(stream=False)
        return await conversation.answer(self._service.work, self._reply)

    def _reply(self, conversation: Conversation, output: RequestOutput, extras: dict[str, Any]) -> ChatCompletion:
        body = self._body
        reply: dict[str, Any] = {
            **self._head,
            "service_tier": None,
            "choices": [self._choice(conversation, completion) for completion in output.outputs],
            "usage": conversation.generation.usage,
        }
        if body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        self._add_prompt(reply, conversation, output)
        warnings = dict.fromkeys([*self._warnings, *conversation.warnings, *output.warnings])
        if warnings:
            reply["warnings"] = list(warnings)
        reply.update(extras)
        return reply  # type: ignore[return-value]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the reply: per choice the role, the pieces of its text, its end."""
        conversation = await self._prepare(stream=True)
        generation = conversation.generation
        chunks = Chunks({**self._head, "object": "chat.completion.chunk"})
        wants_usage, continuous = usage_in_stream(self._body, self._service.settings)
        readers: dict[int, MessageReader] = {}
        async with aclosing(generation.stream()) as outputs:
            async for _, output in outputs:
                for completion in output.outputs:
                    if completion.index not in readers:
                        chunk: dict[str, Any] = {"choices": [self._first_delta(completion.index)]}
                        if not readers:
                            self._add_prompt(chunk, conversation, output)
                            warnings = [*self._warnings, *conversation.warnings, *output.warnings]
                            if warnings:
                                chunk["warnings"] = warnings
                        if wants_usage:
                            chunk["usage"] = generation.usage if continuous else None
                        readers[completion.index] = MessageReader(conversation.reading, completion.index)
                        yield chunks.event(chunk)
                    reader = readers[completion.index]
                    delta = self._delta_of(reader.take(completion))
                    generation.num_reasoning_tokens = sum(one.num_reasoning_tokens for one in readers.values())
                    if delta or self._has_news(completion, continuous=continuous):
                        usage = {"usage": generation.usage if continuous else None} if wants_usage else {}
                        write = partial(self._event, chunks, completion, delta, reader.finish_reason(completion), usage)
                        yield await piece_of(self._service.work, write, num_new(completion))
        last = await generation.extras()
        if wants_usage:
            last["usage"] = generation.usage
        if last:
            write = partial(chunks.event, {"choices": [], **last})
            yield await piece_of(self._service.work, write, generation.size_of_extras)

    async def _prepare(self, *, stream: bool) -> Conversation:
        body = self._body
        length = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        form, warnings = form_beside(self._tools, form_of(body.structured_outputs, body.response_format))
        self._warnings += warnings
        make_params = partial(
            sampling_params,
            self._service,
            body,
            max_tokens=length,
            stream=stream,
            branching=branches(body),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            form=form,
        )
        return await converse(
            self._service,
            self._context,
            body.messages,
            make_params,
            fields=body,
            salt=body.cache_salt,
            priority=body.priority,
            tools=self._tools,
            names=_NAMES if body.max_completion_tokens is None else {**_NAMES, "max_tokens": "max_completion_tokens"},
        )

    def _echoed(self) -> str:
        """The text of the last message when it is to stand before the answer."""
        last = self._body.messages[-1] if self._body.messages else {}
        content = last.get("content")
        echoes = self._body.echo and last.get("role") == self._role and isinstance(content, str)
        return str(content) if echoes else ""

    def _choice(self, conversation: Conversation, completion: CompletionOutput) -> dict[str, Any]:
        parts, finish_reason = conversation.read(completion)
        message = Message.of(parts)
        text = self._echo + message.text
        written: dict[str, Any] = {
            "role": self._role,
            "content": text or (None if message.tool_calls else ""),
            "refusal": None,
            "tool_calls": [_written_call(call) for call in message.tool_calls],
        }
        if conversation.reading is not None and self._shows_reasoning:
            written.update(_reasoning(message.reasoning or None))
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": written,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": completion.stop_reason,
        }
        return self._with_tokens(choice, completion)

    @property
    def _shows_reasoning(self) -> bool:
        return self._body.include_reasoning is not False

    def _first_delta(self, index: int) -> dict[str, Any]:
        delta = {"role": self._role, "content": self._echo}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta_of(self, parts: Sequence[Part]) -> dict[str, Any]:
        """What a piece of a message adds to it, empty for nothing."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case Text():
                    delta["content"] = delta.get("content", "") + part.text
                case Reasoning() if self._shows_reasoning:
                    delta.update(_reasoning(delta.get("reasoning", "") + part.text))
                case CallStart():
                    function = {"name": part.name, "arguments": ""}
                    calls[part.index] = {"index": part.index, "id": part.id, "type": "function", "function": function}
                case CallArguments():
                    call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += part.text
        return {**delta, "tool_calls": list(calls.values())} if calls else delta

    def _event(
        self,
        chunks: Chunks,
        completion: CompletionOutput,
        delta: dict[str, Any],
        finish_reason: str | None,
        rest: dict[str, Any],
        encode: Encode,
    ) -> bytes:
        return chunks.event({"choices": [self._delta(completion, delta, finish_reason)], **rest}, encode)

    def _delta(self, completion: CompletionOutput, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": delta or {"content": ""},
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        return self._with_tokens(choice, completion)

    def _with_tokens(self, choice: dict[str, Any], completion: CompletionOutput) -> dict[str, Any]:
        """Add logprobs and token ids where they are wanted. Mutates choice."""
        if completion.logprobs is not None:
            choice["logprobs"] = self._logprobs.write(completion.token_ids, completion.logprobs)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _has_news(self, completion: CompletionOutput, *, continuous: bool) -> bool:
        """Whether a piece without text says anything: a token may be the middle of a character."""
        more = self._body.logprobs or self._body.return_token_ids or continuous
        return bool(completion.finish_reason or (more and completion.token_ids))

    def _add_prompt(self, reply: dict[str, Any], conversation: Conversation, output: RequestOutput) -> None:
        """What there is to say about the prompt. Mutates reply."""
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = output.prompt_token_ids
        if self._body.return_prompt_text:
            reply["prompt_text"] = conversation.text


def _written_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Under vLLM's name and the one that came before it, which clients read."""
    return {"reasoning": text, "reasoning_content": text}
