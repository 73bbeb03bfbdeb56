"""`AsyncLLMEngine`: the engine for asyncio programs: `async for output in engine.generate(...)`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from quire.config.args import EngineArgs
from quire.engine.core_client import ThreadedCoreClient
from quire.engine.input_processor import as_params
from quire.engine.startup import EngineParts, start
from quire.errors import EngineDeadError, InvalidParameter
from quire.inputs import PromptType
from quire.messages.output import EngineCoreOutputs
from quire.messages.request import AbortRequest
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams


class _Stream:
    """Outputs of one request on their way to one reader; a slow reader gets them merged, so nothing piles up."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self.pending: RequestOutput | None = None
        self.error: Exception | None = None
        self.ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self.pending is not None and self.kind is RequestOutputKind.DELTA:
            self.pending = self.pending.merged(output)
        else:
            self.pending = output
        self.ready.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ready.set()

    async def get(self) -> RequestOutput:
        await self.ready.wait()
        self.ready.clear()
        if self.pending is None:
            assert self.error is not None
            raise self.error
        output, self.pending = self.pending, None
        if self.error is not None:
            self.ready.set()
        return output


class AsyncLLMEngine:
    """One engine in this process, its core stepping in a thread of its own.

    Create it anywhere; use it from one event loop.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self._input = parts.input_processor
        self._output = parts.output_processor
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._core = ThreadedCoreClient(parts.core, self._from_core, self._on_death)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLMEngine:
        """Load the model and make ready.

        Raises: ConfigError and its kin.
        """
        return cls(start(args))

    @property
    def default_params(self) -> SamplingParams:
        """What a request without sampling parameters gets."""
        return self._input.default_params

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped by itself."""
        return self._dead is not None

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come, the last one with `finished`. Leaving the loop aborts the request.

        Raises: RequestError before the first output; EngineDeadError when the engine stops.
        """
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if self._dead is not None:
            raise self._dead
        if request_id in self._streams:
            raise InvalidParameter(f"request_id {request_id!r} is in use; ids must be unique", parameter="request_id")
        self._loop = asyncio.get_running_loop()
        request = await asyncio.to_thread(self._input.process, request_id, prompt, as_params(sampling_params))
        stream = self._streams[request_id] = _Stream(request.core.sampling_params.output_kind)
        self._output.add(request)
        self._core.add(request.core)
        try:
            finished = False
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            if request_id in self._output:
                self._output.abort(request_id)
                self._core.abort(AbortRequest(request_id=request_id))

    async def abort(self, request_id: str) -> None:
        """Stop a request; its reader gets a last output with finish reason abort."""
        output = self._output.abort(request_id)
        if output is not None:
            self._core.abort(AbortRequest(request_id=request_id))
            self._streams[request_id].put(output)

    def close(self) -> None:
        """Stop the engine; running requests end with EngineDeadError. Harmless when called again."""
        self._core.close()
        self._fail_all(EngineDeadError("the engine was closed"))

    def __enter__(self) -> AsyncLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _from_core(self, news: EngineCoreOutputs) -> None:
        """In the core's thread: hand over to the event loop."""
        if self._loop is not None and news.outputs and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: EngineCoreOutputs) -> None:
        outputs, aborts = self._output.process(news.outputs)
        for abort in aborts:
            self._core.abort(abort)
        for output in outputs:
            self._streams[output.request_id].put(output)

    def _on_death(self, error: EngineDeadError) -> None:
        self._dead = error
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._fail_all, error)

    def _fail_all(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        for request_id, stream in self._streams.items():
            self._output.abort(request_id)
            stream.fail(error)
