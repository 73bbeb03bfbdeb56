"""`ResponseWriter`: the reply to one request for a response, whole or as a stream of events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response

from quire.errors import RequestError
from quire.message_formats.parts import Part, Text
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.api.chat import Conversation, converse
from quire.server.api.constraints import form_beside
from quire.server.api.generation import Generation
from quire.server.api.logprobs import ChatLogprobsWriter, num_new
from quire.server.api.message_reader import MessageReader
from quire.server.api.params import sampling_params
from quire.server.api.protocol.openai import ConversationFields
from quire.server.api.protocol.responses import ResponsesRequest, ResponseUsage
from quire.server.api.responses.conversation import find_input, stored
from quire.server.api.responses.output_items import Event, OutputItems, merged
from quire.server.api.responses.request import LOGPROBS, NAMES, check, echoed, effort_in, form_in, tools_in
from quire.server.api.responses.store import ResponseStore
from quire.server.api.unknown_fields import warn_of
from quire.server.http.errors import ApiError, ErrorShape
from quire.server.http.replies import SMALL_REPLY, Encode, encode_in_pieces, piece_of
from quire.server.http.streaming import encode, event
from quire.server.service import Context, Service

_NAMED = "what a client has named (request_id) is not stored: nobody must be able to guess a response's id"


class _Answer:
    """An answer as it comes."""

    def __init__(self, conversation: Conversation, owner_id: str, logprobs: ChatLogprobsWriter) -> None:
        self.output = OutputItems(owner_id)
        self._generation = conversation.generation
        self._reader = MessageReader(conversation.reading, 0)
        self._logprobs = logprobs
        self._unread: list[Any] = []
        """Logprobs of tokens that the reader holds back."""
        self._untold: list[Any] = []
        """Those of tokens that have brought no part yet."""

    def take(self, completion: CompletionOutput, write: Encode) -> Iterator[Event]:
        """The events of an answer, or of the next piece of one."""
        for part, logprobs in merged(self._parts(completion)):
            yield from self.output.add(part, write(logprobs))
        self._generation.num_reasoning_tokens = self._reader.num_reasoning_tokens
        if completion.finish_reason is not None:
            rest = write([*self._untold, *self._unread])
            cut = is_cut(completion) or self._reader.is_last_call_cut
            yield from self.output.finish(is_cut=cut, logprobs=rest)

    def _parts(self, completion: CompletionOutput) -> Iterator[tuple[Part, list[Any]]]:
        """The parts of a piece, those of text with the logprobs of the tokens since the last part."""
        if completion.logprobs is not None:
            self._unread += self._logprobs.write(completion.token_ids, completion.logprobs)["content"]
        num_read, num_thought = 0, self._reader.num_reasoning_tokens
        for num_tokens, parts in self._reader.pieces(completion):
            if self._reader.num_reasoning_tokens == num_thought:
                self._untold += self._unread[num_read : num_read + num_tokens]
            num_read, num_thought = num_read + num_tokens, self._reader.num_reasoning_tokens
            for part in parts:
                told, self._untold = self._untold, []
                yield part, told if isinstance(part, Text) else []
        del self._unread[:num_read]


class ResponseWriter:
    """The reply to one request."""

    def __init__(
        self, service: Service, store: ResponseStore, context: Context, body: ResponsesRequest, model: str
    ) -> None:
        self._service = service
        self._store = store
        self._context = context
        self._body = body
        self._numbers = itertools.count()
        self._warnings = check(body, service)
        self._tools = tools_in(body)
        self._form, warnings = form_beside(self._tools, form_in(body))
        self._warnings += warnings
        self._input = find_input(body, store, context.key, service.settings.max_body_size)
        self.num_stored_bytes = self._input.num_stored_bytes
        """What the request takes from the store."""
        self._items: list[bytes] = []
        """The input as JSON, if it is to be stored."""
        why_not = store.why_off or (_NAMED if body.request_id else "")
        self._stores = body.store is not False and not why_not
        if body.store and why_not:
            self._warnings.append(f"store has no effect: {why_not}")
        self._logprobs = ChatLogprobsWriter(service.engine.tokenizer, body.top_logprobs or 0, as_ids=False)
        self._head = {
            "id": f"resp_{body.request_id or context.id}",
            "object": "response",
            "created_at": context.created,
            "model": model,
            "error": None,
            **echoed(body, self._tools),
        }

    async def whole(self) -> Response:
        """The reply that comes at once."""
        conversation = await self._prepare(stream=False)
        return await conversation.answer(self._service.work, self._reply)

    def _reply(self, conversation: Conversation, output: RequestOutput, extras: dict[str, Any]) -> dict[str, Any]:
        (completion,) = output.outputs
        write = encode if num_new(completion) <= SMALL_REPLY else encode_in_pieces
        answer = _Answer(conversation, self._context.id, self._logprobs)
        for _ in answer.take(completion, write):
            pass
        warnings = [*self._warnings, *conversation.warnings, *output.warnings]
        response = self._finished(conversation, completion, answer, warnings)
        return self._kept({**response, **extras}, write)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the reply."""
        conversation = await self._prepare(stream=True)
        generation, work = conversation.generation, self._service.work
        answer = _Answer(conversation, self._context.id, self._logprobs)
        warnings: list[str] | None = None
        async with aclosing(generation.stream()) as outputs:
            async for _, output in outputs:
                (completion,) = output.outputs
                if warnings is None:
                    warnings = [*self._warnings, *conversation.warnings, *output.warnings]
                    yield self._start(conversation.params, warnings)
                events = await piece_of(work, partial(self._events, answer, completion), num_new(completion))
                if events:
                    yield events
        response = self._finished(conversation, completion, answer, warnings or [])
        response.update(await generation.extras())
        size = generation.num_output_tokens + generation.size_of_extras
        yield await piece_of(work, partial(self._end, response), size)

    def error_event(self, error: ApiError, _: ErrorShape) -> bytes:
        """An error in a stream that has begun."""
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})

    def _start(self, params: SamplingParams, warnings: list[str]) -> bytes:
        response = self._response(params, "in_progress", [], None, warnings)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def _events(self, answer: _Answer, completion: CompletionOutput, write: Encode) -> bytes:
        return b"".join(self._event(kind, fields, write) for kind, fields in answer.take(completion, write))

    def _end(self, response: dict[str, Any], write: Encode) -> bytes:
        response = self._kept(response, write)
        return self._event(f"response.{response['status']}", {"response": response}, write)

    def _event(self, kind: str, fields: dict[str, Any], write: Encode = encode) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **fields}, kind, write)

    async def _prepare(self, *, stream: bool) -> Conversation:
        body = self._body
        reader = await self._service.work.run(self._input.read, body.instructions)
        self._warnings += [*reader.warnings, *warn_of(reader.unknown, self._service)]
        make_params = partial(
            sampling_params,
            self._service,
            body,
            max_tokens=body.max_output_tokens,
            stream=stream,
            logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
            form=self._form,
        )
        fields = ConversationFields(chat_template_kwargs=body.chat_template_kwargs, reasoning_effort=effort_in(body))
        try:
            conversation = await converse(
                self._service,
                self._context,
                reader.messages,
                make_params,
                fields=fields,
                salt=body.cache_salt,
                priority=body.priority,
                tools=self._tools,
                place_of=reader.place_of,
                names=NAMES,
            )
        except RequestError as error:
            raise reader.renamed(error) from error
        if self._stores:
            self._items = await self._service.work.run(self._input.encoded)
        return conversation

    def _kept(self, response: dict[str, Any], write: Encode) -> dict[str, Any]:
        """A finished response, which is stored if it should and can be."""
        if not self._stores:
            return response
        if self._store.put(self._context.key, stored(response, self._items, self._input.previous, write)):
            return response
        why = f"the response was not stored: with its conversation it takes more than {self._store.max_bytes} bytes"
        return {**response, "store": False, "warnings": [*response.get("warnings", ()), why]}

    def _finished(
        self, conversation: Conversation, completion: CompletionOutput, answer: _Answer, warnings: list[str]
    ) -> dict[str, Any]:
        status = "incomplete" if is_cut(completion) else "completed"
        usage = _usage(conversation.generation)
        return self._response(conversation.params, status, answer.output.items, usage, warnings)

    def _response(
        self,
        params: SamplingParams,
        status: str,
        output: list[dict[str, Any]],
        usage: ResponseUsage | None,
        warnings: list[str],
    ) -> dict[str, Any]:
        response = {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "store": self._stores,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "usage": usage,
        }
        return {**response, "warnings": warnings} if warnings else response


def is_cut(completion: CompletionOutput) -> bool:
    """Whether an answer ended before its end."""
    return completion.finish_reason == "length"


def _usage(generation: Generation) -> ResponseUsage:
    return {
        "input_tokens": generation.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "output_tokens": generation.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
        "total_tokens": generation.num_prompt_tokens + generation.num_output_tokens,
    }
