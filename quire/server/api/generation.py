"""The prompts of one HTTP request on the engine: outputs as they come, one record each, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from quire.engine.receipt import Transcript, receipt_of
from quire.engine.why import Timeline
from quire.errors import EngineOverloaded
from quire.inputs import TokensPrompt
from quire.log import get_logger
from quire.observability.prometheus import RequestRecord
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.server.api.protocol.openai import Usage
from quire.server.http.errors import ApiError
from quire.server.service import Context, Service

if TYPE_CHECKING:
    from quire.observability.tracing import RequestSpan

log = get_logger(__name__)

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
        operation: str = "chat",
    ) -> None:
        self._service = service
        self._context = context
        self._prompts = prompts
        self._params = params
        self._operation = operation
        self.num_prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._transcripts = [Transcript(params) for _ in prompts] if context.wants_receipt else []
        self._timelines = [Timeline(context.started_at) for _ in prompts] if context.wants_why else []

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    async def extras(self) -> dict[str, Any]:
        """What the request's headers ask for beside the answer; to be added to a finished reply."""
        found: dict[str, Any] = {}
        if self._timelines:
            found["why"] = [timeline.explain() for timeline in self._timelines]
        if self._transcripts:
            found["receipt"] = await self._service.work.run(receipt_of, self._service.engine.config, self._transcripts)
        return found

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
        return self._one(0) if len(self._prompts) == 1 else self._merged()

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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        record = RequestRecord(self._service.metrics, self._params)
        engine_id = f"{self._context.id}-{index}"
        span = self._span(engine_id)
        try:
            async with aclosing(
                self._service.engine.generate(self._prompts[index], self._params, engine_id)  # type: ignore[type-var]
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
        log.error("request=%s failed: %s", self._context.label, " ".join(output.warnings))
        return ApiError(500, "internal_error", "The request failed while it ran. The cause is in the server's log.")
