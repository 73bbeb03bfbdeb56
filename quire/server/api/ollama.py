"""POST /api/chat and /api/generate: Ollama's API, translated onto the path of chat completions and completions."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.errors import InvalidParameter, shown
from quire.message_formats.parts import CallArguments, CallStart, Message, Part, Reasoning, joined
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RANGES, SamplingParams
from quire.server.api import ollama_models
from quire.server.api.admin import check_ready
from quire.server.api.chat import Conversation, converse
from quire.server.api.generation import Generation
from quire.server.api.logprobs import ChatLogprobsWriter, num_new
from quire.server.api.message_reader import (
    MessageReader,
    check_thinks,
    input_of,
    is_whole,
    thinking_kwargs,
    thinks_anyway,
)
from quire.server.api.ollama_models import ERRORS, checked_model
from quire.server.api.output_form import ollama_form
from quire.server.api.params import ONE_ANSWER, REFUSED, Refusal, check_fields, other_name, sampling_params
from quire.server.api.prompts import cache_salt, completion_prompts
from quire.server.api.protocol.fields import GenerationFields, SamplingFields
from quire.server.api.protocol.ollama import (
    AnswerRequest,
    ChatReply,
    ChatRequest,
    Ended,
    GenerateReply,
    GenerateRequest,
    Options,
)
from quire.server.api.protocol.openai import ConversationFields
from quire.server.api.tools import NO_TOOLS, ToolUse, openai_tools
from quire.server.http.body import strict_route
from quire.server.http.errors import invalid
from quire.server.http.replies import Encode, piece_of
from quire.server.http.streaming import STREAMED_LINES, LineStream, json_reply, line, unless_gone
from quire.server.service import Context, Service, context_of

_NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
_ONE_SAMPLER = "it is not built; use temperature, top_k, top_p and min_p"
_REFUSED = {
    **REFUSED,
    "context": Refusal("send the conversation to /api/chat, or write it into the prompt", ([],)),
    "images": Refusal(REFUSED["modalities"].why, ([],)),
    "max_tokens": other_name("options.num_predict"),
    "mirostat": Refusal(_ONE_SAMPLER, (0,)),
    "n": ONE_ANSWER,
    "penalize_newline": Refusal("penalties treat all tokens alike", (True,)),
    "repeat_last_n": Refusal("penalties look at the whole context", (-1,)),
    "tfs_z": Refusal(_ONE_SAMPLER, (1,)),
    "typical_p": Refusal(_ONE_SAMPLER, (1,)),
}
_SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
_DURATION = re.compile(r"[+-]?(([0-9]+(\.[0-9]*)?(ns|us|\u00b5s|ms|s|m|h))+|[0-9]+(\.[0-9]*)?)")
MAX_TOP_LOGPROBS = 20


def routes(service: Service) -> APIRouter:
    """The routes of Ollama's API."""
    router = APIRouter(route_class=strict_route(service, takes_any_type=True), responses=ERRORS)

    @router.post("/api/chat", response_model=ChatReply, responses=STREAMED_LINES)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as a stream of JSON lines unless `stream` is false."""
        return await _respond(_ChatReply(service, context_of(request.scope), body), request)

    @router.post("/api/generate", response_model=GenerateReply, responses=STREAMED_LINES)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt, or with `raw` continue it; a stream of JSON lines unless `stream` is false."""
        return await _respond(_GenerateReply(service, context_of(request.scope), body), request)

    router.include_router(ollama_models.routes(service))
    return router


async def _respond(reply: _ChatReply | _GenerateReply, request: Request) -> Response:
    if reply.asks_nothing:
        check_ready(reply.service)
        return json_reply(reply.loaded())
    if reply.streams:
        return LineStream(reply.stream(), reply.service.settings)
    return await unless_gone(request, reply.service.settings, reply.whole())


class _Reply(ABC):
    """The reply to one request, whole or as a stream."""

    asks_nothing: bool
    """There is nothing to answer: clients send this to load a model, or to unload it."""

    def __init__(self, service: Service, context: Context, body: AnswerRequest) -> None:
        self.service = service
        self.streams = body.stream is not False
        self._context = context
        self._options = Options() if body.options is None else body.options
        self._model = checked_model(service, body.model, is_given="model" in body.model_fields_set)
        self._warnings = [*check_fields(body, service, refused=_REFUSED), *_check_keep_alive(body)]
        self._warnings += _check_context(self._options, service.engine.config.model_config.max_model_len)
        self._num_logprobs = _num_logprobs(body)
        self._thinks = _check_think(service, body)
        self._waiting: list[Part] = []
        self._form = ollama_form(body.format)
        self._logprobs = ChatLogprobsWriter(service.engine.tokenizer, self._num_logprobs or 0, as_ids=False)

    @abstractmethod
    async def _prepare(self, *, stream: bool) -> Conversation:
        """The request on its way to the engine."""

    @abstractmethod
    def _written(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Parts of a message where clients look for them."""

    def loaded(self) -> dict[str, Any]:
        """The reply to a request that asks nothing: the model is always loaded.

        Raises: ApiError for options that no request may have.
        """
        self._params(stream=False)
        reply = {**self._piece(()), "done": True, "done_reason": "load"}
        return {**reply, "warnings": self._warnings} if self._warnings else reply

    async def whole(self) -> Response:
        """The reply that comes at once."""
        conversation = await self._prepare(stream=False)
        return await conversation.answer(self.service.work, self._whole)

    def _whole(self, conversation: Conversation, output: RequestOutput, extras: dict[str, Any]) -> dict[str, Any]:
        (completion,) = output.outputs
        warnings = [*self._warnings, *conversation.warnings, *map(_renamed, output.warnings)]
        parts, _ = conversation.read(completion)
        reply = self._piece(parts, completion, warnings)
        return {**reply, "done": True, **self._end(conversation.generation, output), **extras}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The lines of the reply: the pieces of its text, then one that says how it ended."""
        conversation = await self._prepare(stream=True)
        generation = conversation.generation
        warnings = [*self._warnings, *conversation.warnings]
        begun = False
        reader = MessageReader(conversation.reading, 0)
        async with aclosing(generation.stream()) as outputs:
            async for _, output in outputs:
                (completion,) = output.outputs
                if not begun:
                    begun = True
                    warnings += map(_renamed, output.warnings)
                parts = self._whole_calls(reader.take(completion), is_end=output.finished)
                if parts or completion.logprobs:
                    write = partial(self._line, parts, completion, warnings)
                    yield await piece_of(self.service.work, write, num_new(completion))
                    warnings = []
        end = {**self._piece((), None, warnings), "done": True, **self._end(generation, output)}
        write = partial(line, {**end, **await generation.extras()})
        yield await piece_of(self.service.work, write, generation.size_of_extras)

    def _whole_calls(self, parts: Sequence[Part], *, is_end: bool) -> list[Part]:
        """The same parts, but calls wait until they are whole: their arguments are data here. Mutates: what waits."""
        waiting = joined([*self._waiting, *parts])
        calls = [index for index, part in enumerate(waiting) if isinstance(part, CallStart)]
        is_open = (
            bool(calls) and not is_end and all(isinstance(part, CallArguments) for part in waiting[calls[-1] + 1 :])
        )
        first = calls[-1] if is_open else len(waiting)
        self._waiting = waiting[first:]
        return waiting[:first]

    def _line(self, parts: Sequence[Part], completion: CompletionOutput, warnings: list[str], encode: Encode) -> bytes:
        return line({**self._piece(parts, completion, warnings), "done": False}, encode)

    def _piece(
        self, parts: Sequence[Part], completion: CompletionOutput | None = None, warnings: list[str] | None = None
    ) -> dict[str, Any]:
        told, cut = _whole_only(self._shown(parts))
        piece: dict[str, Any] = {"model": self._model, "created_at": _now(), **self._written(told)}
        if completion is not None and completion.logprobs is not None:
            piece["logprobs"] = self._logprobs.write(completion.token_ids, completion.logprobs)["content"]
        if warnings or cut:
            piece["warnings"] = list(dict.fromkeys([*(warnings or ()), *cut]))
        return piece

    def _end(self, generation: Generation, output: RequestOutput) -> Ended:
        stats = output.metrics
        prefill = decode = 0.0
        if stats is not None and stats.first_token_at:
            prefill, decode = stats.first_token_at - stats.scheduled_at, stats.last_token_at - stats.first_token_at
        return {
            "done_reason": output.outputs[0].finish_reason or "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._context.started_at),
            "load_duration": 0,
            "prompt_eval_count": generation.num_prompt_tokens,
            "prompt_eval_duration": _nanoseconds(prefill),
            "eval_count": generation.num_output_tokens,
            "eval_duration": _nanoseconds(decode),
        }

    def _params(self, *, stream: bool) -> SamplingParams:
        options = self._options
        fields = SamplingFields(
            **{name: getattr(options, name) for name in _SAME_OPTIONS}, repetition_penalty=options.repeat_penalty
        )
        try:
            return sampling_params(
                self.service,
                fields,
                max_tokens=_max_tokens(options),
                stream=stream,
                logprobs=self._num_logprobs,
                form=None if self.asks_nothing else self._form,
            )
        except InvalidParameter as error:
            raise invalid(f"options.{error.parameter}", _renamed(error.message)) from None

    async def _converse(
        self,
        messages: list[dict[str, Any]],
        *,
        stream: bool,
        template: str | None = None,
        continues: bool = False,
        tools: ToolUse = NO_TOOLS,
    ) -> Conversation:
        level = self._thinks if isinstance(self._thinks, str) else None
        thinks = None if level is not None or not self.service.has_conversations else self._thinks
        fields = ConversationFields(
            chat_template=template,
            continue_final_message=continues,
            chat_template_kwargs=thinking_kwargs(self.service, bool(thinks)) if thinks is not None else None,
            reasoning_effort=level,
        )
        self._warnings += thinks_anyway(self.service, thinks, "think: false")
        make_params = partial(self._params, stream=stream)
        return await converse(self.service, self._context, messages, make_params, fields=fields, salt=None, tools=tools)

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Without the thinking, for a client that wants none."""
        if self._thinks is not False:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]


class _ChatReply(_Reply):
    """A reply of /api/chat."""

    def __init__(self, service: Service, context: Context, body: ChatRequest) -> None:
        super().__init__(service, context, body)
        self._messages = [_message(index, message) for index, message in enumerate(body.messages or ())]
        self.asks_nothing = not self._messages
        self._tools = openai_tools(body.tools or None, None, parallel=None)

    async def _prepare(self, *, stream: bool) -> Conversation:
        continues = self._messages[-1].get("role") == "assistant"
        return await self._converse(self._messages, stream=stream, continues=continues, tools=self._tools)

    def _written(self, parts: Sequence[Part]) -> dict[str, Any]:
        found = Message.of(parts)
        message: dict[str, Any] = {"role": self.service.settings.response_role, "content": found.text}
        if found.reasoning:
            message["thinking"] = found.reasoning
        if found.tool_calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": input_of(call.arguments)}} for call in found.tool_calls
            ]
        return {"message": message}


class _GenerateReply(_Reply):
    """A reply of /api/generate."""

    def __init__(self, service: Service, context: Context, body: GenerateRequest) -> None:
        super().__init__(service, context, body)
        self._body = body
        self.asks_nothing = not body.prompt
        self._is_plain = bool(body.raw) or not (self.service.has_conversations or body.template or body.system)
        if self._is_plain and body.think is not None:
            self._warnings.append("think has no effect: the prompt is sent as it is, without a chat template")
        if body.raw and (body.system or body.template):
            raise invalid("raw", "raw sends the prompt as it is; leave out system and template, or raw.")
        if body.template and not service.settings.trust_request_chat_template:
            raise invalid(
                "template",
                "template in the request is disabled; --trust-request-chat-template lets requests bring one, in Jinja.",
            )

    async def _prepare(self, *, stream: bool) -> Conversation:
        body = self._body
        prompt = body.prompt or ""
        if self._is_plain:
            return await self.service.work.run(self._raw, prompt, stream=stream)
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": prompt}]
        return await self._converse(messages, stream=stream, template=body.template or None)

    def _raw(self, text: str, *, stream: bool) -> Conversation:
        """The prompt without a template. A model that has none is asked in this way always, as Ollama does."""
        params = self._params(stream=stream)
        salt = cache_salt(self._context, None)
        prompts = completion_prompts(self.service, [text], params, fields=GenerationFields(), salt=salt)
        generation = Generation(self.service, self._context, prompts, params, operation="text_completion")
        return Conversation(generation, params, text, [])

    def _written(self, parts: Sequence[Part]) -> dict[str, Any]:
        found = Message.of(parts)
        thinking = {"thinking": found.reasoning} if found.reasoning else {}
        return {"response": found.text, **thinking}


def _whole_only(parts: Sequence[Part]) -> tuple[Sequence[Part], list[str]]:
    """Parts without a last call that the end of the output has cut, and a warning of it.

    Clients run every call they find, and arguments are data here: what is missing of them would not show.
    """
    calls = Message.of(parts).tool_calls
    if not calls or is_whole(calls[-1].arguments):
        return parts, []
    begin = max(index for index, part in enumerate(parts) if isinstance(part, CallStart))
    why = "the output ended before its arguments did. Raise num_predict, or change stop"
    return parts[:begin], [f"the call of {calls[-1].name} is left out: {why}."]


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form. Ollama's clients leave empty fields out.

    Raises: ApiError.
    """
    if message.get("images"):
        place = f"messages[{index}].images"
        raise invalid(place, f"{place} is not supported: {REFUSED['modalities'].why}.", "unsupported_content")
    names = {"tool_name": "name"}
    return {"content": "", **{names.get(name, name): value for name, value in message.items() if name != "images"}}


def _renamed(message: str) -> str:
    """What the engine says about a field, which stands first, under the name that Ollama has for it."""
    name, space, rest = message.partition(" ")
    return _NAMES.get(name, name) + space + rest


def _max_tokens(options: Options) -> int | None:
    count = options.num_predict
    if count is None or count in (-1, -2):
        return None
    if count not in RANGES["max_tokens"]:
        raise invalid(
            "options.num_predict",
            f"num_predict must be {RANGES['max_tokens']}, or -1 for as many tokens as the context holds; got "
            f"{shown(count)}.",
        )
    return count


def _check_context(options: Options, limit: int) -> list[str]:
    """A warning about a context that is smaller than the server's.

    Raises: ApiError for a larger one.
    """
    asked = options.num_ctx
    if asked is None or asked == limit:
        return []
    if not 1 <= asked <= limit:
        raise invalid(
            "options.num_ctx",
            f"num_ctx must be in [1, {limit}], the context of this server; got {shown(asked)}. Lower it, or start the "
            "server with a larger --max-model-len.",
        )
    return [f"num_ctx={asked} has no effect: the context of this server has {limit} tokens"]


def _check_keep_alive(body: AnswerRequest) -> list[str]:
    """A warning where the model would be unloaded some time.

    Raises: ApiError.
    """
    given = body.keep_alive
    if given is None or (isinstance(given, float | int) and given < 0):
        return []
    if isinstance(given, str):
        if not _DURATION.fullmatch(given):
            raise invalid("keep_alive", f"keep_alive must be a duration such as 5m or 300; got {shown(given)}.")
        if given.startswith("-"):
            return []
    return ["keep_alive has no effect: the model stays loaded as long as the server runs"]


def _check_think(service: Service, body: AnswerRequest) -> bool | str | None:
    """Whether the model shall think, or how much; None leaves it to the template.

    Raises: UnsupportedFeature where thinking could not be told from the answer.
    """
    if body.think is not None and body.think is not False:
        check_thinks(service, "think")
    return body.think


def _num_logprobs(body: AnswerRequest) -> int | None:
    """How many candidates to report per token; None: no logprobs at all.

    Raises: ApiError.
    """
    top = body.top_logprobs or 0
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise invalid("top_logprobs", f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {shown(top)}.")
    if top and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs requires logprobs to be true.")
    return top if body.logprobs else None


def _nanoseconds(seconds: float) -> int:
    """At least one: clients divide by it."""
    return max(1, int(seconds * 1e9))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
