"""The prompts of one HTTP request on the engine: outputs as they come, one record each, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.engine.front.why import Timeline
from quire.engine.receipt import Transcript, receipt_of
from quire.errors import EngineOverloaded, counted
from quire.inputs import TokensPrompt
from quire.log import get_logger
from quire.observability.prometheus import RequestRecord
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.api.prompts import check_repeated
from quire.server.api.protocol.openai import Usage
from quire.server.http.errors import ApiError, invalid, overloaded
from quire.server.http.replies import made
from quire.server.service import Context, Service

if TYPE_CHECKING:
    from quire.observability.tracing import RequestSpan

log = get_logger(__name__)

RECEIPT = "x-quire-receipt"
NUM_EXPLAINED = 128
"""Numbers of one prompt's `why`, about."""

Numbered = tuple[int, RequestOutput]
"""Which prompt, and what is new about it."""


class Generation:
    """Some prompts with the same parameters. Leaving `stream` early, or cancelling, aborts them in the engine."""

    def __init__(
        self,
        service: Service,
        context: Context,
        prompts: Sequence[TokensPrompt],
        params: SamplingParams,
        *,
        priority: int | None = None,
        operation: str = "chat",
    ) -> None:
        self._service = service
        self._context = context
        self._prompts = prompts
        self._params = params
        self._priority = priority or 0
        self._operation = operation
        self._tenant = context.engine_tenant
        self.num_prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        """Of those, as far as they were read."""
        self._check_size()
        if context.wants_receipt:
            check_repeated(self._num_receipted, RECEIPT)
        self._transcripts = self._new_transcripts() if context.wants_receipt else []
        self._timelines = [Timeline(context.started_at) for _ in prompts] if context.wants_why else []

    def _new_transcripts(self) -> list[Transcript]:
        contained = self._service.engine.input_processor.self_contained
        return [Transcript(contained(self._params, prompt["prompt_token_ids"])) for prompt in self._prompts]

    def _check_size(self) -> None:
        """Refuse a request that asks for too much at once.

        Raises: ApiError.
        """
        settings, n, count = self._service.settings, self._params.num_sequences, len(self._prompts)
        limit, flag = min(
            (settings.max_sequences_per_request, "--max-sequences-per-request"),
            (settings.max_concurrent_sequences, "--max-concurrent-sequences"),
            (settings.max_concurrent_sequences_per_key or count * n, "--max-concurrent-sequences-per-key"),
        )
        if count * n > limit:
            name = self._params.name_of_num_sequences
            raise invalid(
                name,
                f"The request asks for {count * n} sequences ({counted(count, 'prompt')}, {name}={n}); the limit is "
                f"{limit}. Send several requests, or raise {flag}.",
            )
        context = self._service.engine.config.model_config.max_model_len
        lengths = [len(prompt["prompt_token_ids"]) for prompt in self._prompts]
        output = context if self._params.max_tokens is None else self._params.max_tokens
        tokens = sum(length + n * min(output, max(0, context - length)) for length in lengths)
        if tokens > settings.max_tokens_per_request:
            raise invalid(
                "max_tokens",
                f"The request asks for {tokens} tokens (prompts of {sum(lengths)}, the rest is max_tokens of every "
                f"sequence); the limit is {settings.max_tokens_per_request}. Lower max_tokens, send several requests, "
                "or raise --max-tokens-per-request.",
            )

    def _enter(self) -> None:
        """Count the sequences of one prompt.

        Raises: ApiError 429 when there are too many.
        """
        settings, counts = self._service.settings, self._service.peers.counts
        key, n = self._context.key, self._params.num_sequences
        total, own = settings.max_concurrent_sequences, settings.max_concurrent_sequences_per_key
        refusal = None
        if own and counts.num_sequences(key) + n > own:
            more = counted(own, "sequence")
            refusal = f"This API key would have more than {more} in progress, its limit. Wait for some to end."
        elif not counts.has_room_for_sequences(key, n, total):
            held = counted(counts.num_sequences(), "sequence")
            refusal = f"The server has {held} in progress; its limit is {total}. Try again."
        if refusal is not None:
            self._service.metrics.refused("sequences")
            raise overloaded(refusal)
        counts.enter_sequences(key, n)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
        }

    async def extras(self) -> dict[str, Any]:
        """What the request's headers ask for beside the answer; to be added to a finished reply."""
        found: dict[str, Any] = {}
        if self._timelines:
            found["why"] = await made(self._service.work, partial(_explained, self._timelines))
        if self._transcripts:
            write = partial(receipt_of, self._service.identity, self._transcripts)
            found["receipt"] = await made(self._service.work, write)
        return found

    @property
    def size_of_extras(self) -> int:
        """How many numbers `extras` has, about."""
        receipted = self._num_receipted + self.num_output_tokens if self._transcripts else 0
        return receipted + NUM_EXPLAINED * len(self._timelines)

    @property
    def _num_receipted(self) -> int:
        """What a receipt says about the prompts: tokens, and what the parameters list, once for each prompt."""
        return self.num_prompt_tokens + len(self._prompts) * self._params.num_listed

    async def outputs(self) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts."""
        final: dict[int, RequestOutput] = {}
        async with aclosing(self.stream()) as outputs:
            async for index, output in outputs:
                final[index] = output
        return [final[index] for index in range(len(self._prompts))]

    def stream(self) -> AsyncGenerator[Numbered, None]:
        """Outputs as they come.

        Raises: ApiError when a request fails while it runs; QuireError when it is refused.
        """
        if len(self._prompts) == 1:
            return self._one(0)
        self._check_room()
        return self._merged()

    def _check_room(self) -> None:
        """Refuse many prompts together, before work is done for the first of them.

        Raises: EngineOverloaded.
        """
        count = len(self._prompts)
        try:
            self._service.engine.check_room(
                self._tenant,
                num_requests=count,
                num_sequences=count * self._params.num_sequences,
                num_tokens=self.num_prompt_tokens,
            )
        except EngineOverloaded:
            self._service.metrics.refused("queue")
            raise

    async def _merged(self) -> AsyncGenerator[Numbered, None]:
        merged: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(len(self._prompts))
        tasks = []
        try:
            for index in range(len(self._prompts)):
                tasks.append(asyncio.create_task(self._forward(index, merged)))
                await asyncio.sleep(0)  # others get their turn: a thousand requests are checked and encoded here
            num_running = len(tasks)
            while num_running:
                item = await merged.get()
                if item is None:
                    num_running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            await _ended(tasks)

    async def _forward(self, index: int, merged: asyncio.Queue[Numbered | Exception | None]) -> None:
        """Put one prompt's outputs into the queue; while nobody takes them the engine merges them."""
        try:
            async with aclosing(self._one(index)) as outputs:
                async for numbered in outputs:
                    await merged.put(numbered)
        except Exception as error:
            await merged.put(error)
        else:
            await merged.put(None)

    async def _one(self, index: int) -> AsyncGenerator[Numbered, None]:
        self._enter()
        record = RequestRecord(self._service.metrics, self._params)
        engine_id = f"{self._context.id}-{index}"
        span = self._span(engine_id)
        try:
            async with aclosing(
                self._generate(index, engine_id)  # type: ignore[type-var]
            ) as outputs:
                async for output in outputs:
                    if not record.last_at:
                        self.num_cached_tokens += output.num_cached_tokens
                    self.num_output_tokens += record.observe(output)
                    if span is not None:
                        span.observe(output)
                    if self._transcripts:
                        self._transcripts[index].add(output)
                    if self._timelines:
                        self._timelines[index].add(output)
                    if record.failed:
                        raise self._failure(output)
                    yield index, output
        except (Exception, asyncio.CancelledError) as error:
            if span is not None:
                span.close(type(error).__name__)
                span = None
            record.reason = "abort" if isinstance(error, asyncio.CancelledError) else "error"
            if isinstance(error, EngineOverloaded):
                self._service.metrics.refused("queue")
            raise
        finally:
            self._service.peers.counts.leave_sequences(self._context.key, self._params.num_sequences)
            record.close()
            if span is not None:
                span.close(None)
            if self._service.settings.enable_log_requests:
                log.info(
                    "request=%s id=%s end=%s prompt_tokens=%d cached_tokens=%d output_tokens=%d",
                    self._context.label,
                    engine_id,
                    record.reason,
                    record.num_prompt_tokens,
                    record.num_cached_tokens,
                    record.num_output_tokens,
                )

    def _generate(self, index: int, engine_id: str) -> AsyncIterator[RequestOutput]:
        return self._service.engine.generate(
            self._prompts[index],
            self._params,
            engine_id,
            tenant=self._tenant,
            received_at=self._context.started_at,
            priority=self._priority,
        )

    def _span(self, engine_id: str) -> RequestSpan | None:
        service, context = self._service, self._context
        if service.tracer is None:
            return None
        return service.tracer.start(
            self._operation,
            service.names[0],
            engine_id,
            self._params,
            started_at=context.started_at,
            parent=context.trace_parent,
        )

    def _failure(self, output: RequestOutput) -> ApiError:
        if output.failure is not None and output.failure.is_request_fault:
            return ApiError(400, "request_failed", output.failure.message)
        log.error("request=%s failed: %s", self._context.label, " ".join(output.warnings))
        return ApiError(500, "internal_error", "The request failed while it ran. The cause is in the server's log.")


def _explained(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    return [timeline.explain() for timeline in timelines]


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end. One after the other: each tells the engine and counts, and a thousand at
    once would keep everybody else waiting."""
    left = iter(tasks)
    try:
        for task in left:
            task.cancel()
            await asyncio.sleep(0)
    finally:
        for task in left:  # this one was cancelled, too
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
