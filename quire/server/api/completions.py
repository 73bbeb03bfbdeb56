"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.inputs import TokensPrompt
from quire.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.sampling_params import SamplingParams
from quire.server.api.generation import Generation
from quire.server.api.logprobs import CompletionLogprobsWriter, num_new, num_numbers, prompt_logprobs
from quire.server.api.output_form import form_of
from quire.server.api.params import (
    REFUSED,
    branches,
    check_fields,
    check_stream,
    other_name,
    sampling_params,
    tokens_as_ids,
    usage_in_stream,
)
from quire.server.api.prompts import cache_salt, check_repeated, completion_prompts
from quire.server.api.protocol.openai import Completion, CompletionChoice, CompletionRequest, Usage
from quire.server.api.unknown_fields import unknown_in_form, warn_of
from quire.server.http.body import strict_route
from quire.server.http.errors import invalid
from quire.server.http.replies import Encode, piece_of, reply_of
from quire.server.http.streaming import STREAMED, Chunks, EventStream, unless_gone
from quire.server.service import Context, Service, context_of

DEFAULT_MAX_TOKENS = 16
_REFUSED = {
    **REFUSED,
    "max_completion_tokens": other_name("max_tokens"),
    "max_output_tokens": other_name("max_tokens"),
    "stop_sequences": other_name("stop"),
}


def routes(service: Service) -> APIRouter:
    """The route of completions."""
    router = APIRouter(route_class=strict_route(service))

    @router.post("/v1/completions", response_model=Completion, responses=STREAMED)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Complete one prompt or many, each in `n` ways."""
        given = "model" in body.model_fields_set
        reply = _Reply(service, context_of(request.scope), body, service.check_model(body.model, is_given=given))
        if body.stream:
            return EventStream(reply.stream(), service.settings)
        return await unless_gone(request, service.settings, reply.whole())

    return router


class _Reply:
    """The reply to one request, whole or as a stream."""

    def __init__(self, service: Service, context: Context, body: CompletionRequest, model: str) -> None:
        self._service = service
        self._context = context
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"cmpl-{body.request_id or context.id}",
            "object": "text_completion",
            "created": context.created,
            "model": model,
            "system_fingerprint": service.fingerprint,
        }
        self._warnings = check_fields(body, service, refused=_REFUSED)
        self._warnings += warn_of(unknown_in_form(body.response_format, "response_format"), service)
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        self._only_scores = bool(body.echo) and body.max_tokens == 0
        """The prompt is echoed and nothing is written after it; the engine draws one token all the same."""
        check_stream(body)
        if body.logprobs is not None and body.logprobs < 0:
            raise invalid("logprobs", f"logprobs must be between 0 and 20, got {body.logprobs}.")

    async def whole(self) -> Response:
        """The reply that comes at once."""
        generation, params = await self._prepare(stream=False)
        outputs = await generation.outputs()
        if self._only_scores:
            generation.num_output_tokens = 0
        extras = await generation.extras()
        build = partial(self._reply, outputs, params, generation.usage, extras)
        return await reply_of(self._service.work, build, num_numbers(outputs) + generation.size_of_extras)

    def _reply(
        self, outputs: list[RequestOutput], params: SamplingParams, usage: Usage, extras: dict[str, Any]
    ) -> Completion:
        choices = [
            self._choice(index * params.n + completion.index, output, completion, is_first=True)
            for index, output in enumerate(outputs)
            for completion in output.outputs
        ]
        reply: dict[str, Any] = {**self._head, "choices": choices, "usage": usage}
        warnings = dict.fromkeys([*self._warnings, *(text for output in outputs for text in output.warnings)])
        if warnings:
            reply["warnings"] = list(warnings)
        reply.update(extras)
        return reply  # type: ignore[return-value]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of the reply."""
        generation, params = await self._prepare(stream=True)
        wants_usage, continuous = usage_in_stream(self._body, self._service.settings)
        chunks = Chunks(self._head)
        begun: set[int] = set()
        said: set[str] = set()
        async with aclosing(generation.stream()) as outputs:
            async for prompt_index, output in outputs:
                for completion in output.outputs:
                    index = prompt_index * params.n + completion.index
                    is_first = index not in begun
                    if not (completion.text or is_first or self._has_news(completion, continuous=continuous)):
                        continue
                    choice = partial(self._choice, index, output, completion, is_first=is_first)
                    chunk: dict[str, Any] = {}
                    if self._only_scores:
                        generation.num_output_tokens = 0
                    if wants_usage:
                        chunk["usage"] = generation.usage if continuous else None
                    if is_first:
                        warnings = [text for text in (*self._warnings, *output.warnings) if text not in said]
                        if warnings:
                            chunk["warnings"] = warnings
                        said.update(warnings)
                        begun.add(index)
                    size = num_numbers([output]) if is_first else num_new(completion)
                    yield await piece_of(self._service.work, partial(_event, chunks, choice, chunk), size)
        last = await generation.extras()
        if wants_usage:
            last["usage"] = generation.usage
        if last:
            write = partial(chunks.event, {"choices": [], **last})
            yield await piece_of(self._service.work, write, generation.size_of_extras)

    async def _prepare(self, *, stream: bool) -> tuple[Generation, SamplingParams]:
        return await self._service.work.run(self._generation, stream=stream)

    def _generation(self, *, stream: bool) -> tuple[Generation, SamplingParams]:
        params, prompts = self._prompts(stream=stream)
        generation = Generation(
            self._service,
            self._context,
            prompts,
            params,
            priority=self._body.priority,
            operation="text_completion",
        )
        return generation, params

    def _prompts(self, *, stream: bool) -> tuple[SamplingParams, list[TokensPrompt]]:
        body = self._body
        params = sampling_params(
            self._service,
            body,
            max_tokens=1 if self._only_scores else self._max_tokens(),
            stream=stream,
            branching=branches(body),
            logprobs=body.logprobs,
            prompt_logprobs=self._prompt_logprobs(),
            form=form_of(body.structured_outputs, body.response_format),
        )
        prompts = completion_prompts(
            self._service,
            body.prompt,
            params,
            fields=body,
            salt=cache_salt(self._context, body.cache_salt),
            add_special_tokens=body.add_special_tokens is not False,
        )
        check_repeated(params.n * sum(map(self._num_repeated, prompts)), "echo, prompt_logprobs, return_token_ids")
        return params, prompts

    def _num_repeated(self, prompt: TokensPrompt) -> int:
        """What each choice says about a prompt."""
        body, num_tokens = self._body, len(prompt["prompt_token_ids"])
        count = num_tokens if body.return_token_ids else 0
        if body.echo:
            count += len(prompt.get("prompt", "")) or num_tokens
        if body.echo and body.logprobs is not None:
            count += num_tokens * (2 + self._num_candidates(body.logprobs))
        if body.prompt_logprobs is not None:
            count += num_tokens * (1 + self._num_candidates(body.prompt_logprobs))
        return count

    def _num_candidates(self, asked: int) -> int:
        return self._service.engine.config.model_config.arch.vocab_size if asked == -1 else asked

    def _max_tokens(self) -> int | None:
        """As asked; 16 when the field is left out; null is the model's own limit, or all that fits."""
        return self._body.max_tokens if "max_tokens" in self._body.model_fields_set else DEFAULT_MAX_TOKENS

    def _prompt_logprobs(self) -> int | None:
        if self._body.prompt_logprobs is None and self._body.echo:
            return self._body.logprobs
        return self._body.prompt_logprobs

    def _has_news(self, completion: CompletionOutput, *, continuous: bool) -> bool:
        """Whether a piece without text says anything: a token may be the middle of a character."""
        body = self._body
        more = body.logprobs is not None or body.return_token_ids or continuous
        return bool(completion.finish_reason or (more and completion.token_ids))

    def _choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, *, is_first: bool
    ) -> CompletionChoice:
        """A completion, or the next piece of it; the first one brings what there is about the prompt."""
        body = self._body
        echoes = is_first and bool(body.echo)
        text, token_ids = ("", []) if self._only_scores else (completion.text, completion.token_ids)
        choice: CompletionChoice = {
            "index": index,
            "text": self._prompt_text(output) + text if echoes else text,
            "logprobs": None,
            "finish_reason": "length" if self._only_scores else completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if body.logprobs is not None:
            scored = [] if self._only_scores else completion.logprobs or []
            choice["logprobs"] = self._logprobs(index, output, token_ids, scored, echoes=echoes)
        if body.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        return choice

    def _logprobs(
        self, index: int, output: RequestOutput, token_ids: list[int], scored: list[TokenLogprobs], *, echoes: bool
    ) -> Any:
        writer = self._writers.get(index)
        if writer is None:
            writer = self._writers[index] = CompletionLogprobsWriter(
                self._service.engine.tokenizer,
                [] if self._body.echo else output.prompt_token_ids,
                self._body.logprobs or 0,
                skip_special_tokens=self._body.skip_special_tokens is not False,
                as_ids=tokens_as_ids(self._body, self._service.settings),
            )
        if echoes:
            before = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
            return writer.write([*output.prompt_token_ids, *token_ids], [*before, *scored])
        return writer.write(token_ids, scored)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._service.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)


def _event(chunks: Chunks, choice: Callable[[], CompletionChoice], rest: dict[str, Any], encode: Encode) -> bytes:
    return chunks.event({"choices": [choice()], **rest}, encode)
