"""`AsyncLLMEngine`: the engine for asyncio programs: `async for output in engine.generate(...)`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from quire.config.args import EngineArgs
from quire.engine.core_client import ThreadedCoreClient
from quire.engine.input_processor import ProcessedRequest, as_params, check_request_id
from quire.engine.startup import EngineParts, start
from quire.errors import EngineDeadError
from quire.inputs import PromptType
from quire.messages.output import EngineCoreOutputs
from quire.messages.request import AbortRequest
from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams


class _Stream:
    """Outputs of one request on their way to one reader; a slow reader gets them merged, so nothing piles up."""

    def __init__(self, core_id: str) -> None:
        self.core_id = core_id
        """What the core calls the request. An id of the user's may come again while the core still speaks of the
        request that had it before; this one never does."""
        self.kind = RequestOutputKind.CUMULATIVE
        self.aborted = False
        """abort() came while the prompt was being tokenised."""
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        if self._pending is not None and self.kind is RequestOutputKind.DELTA:
            self._pending = self._pending.merged(output)
        else:
            self._pending = output
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        if self._pending is None:
            assert self._error is not None
            raise self._error
        output, self._pending = self._pending, None
        if self._error is None:
            self._ready.clear()
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
        """By the user's request id."""
        self._readers: dict[str, _Stream] = {}
        """By the core's request id; those whose request was given to the core."""
        self._ordinals = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._errored = False
        self._why_dead: str | None = None
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
        return self._errored

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
        check_request_id(request_id, self._streams)
        self._check_alive()
        self._loop = asyncio.get_running_loop()
        stream = self._streams[request_id] = _Stream(f"{request_id}#{next(self._ordinals)}")
        try:
            params = as_params(sampling_params)
            request = await asyncio.to_thread(self._input.process, stream.core_id, prompt, params)
            self._check_alive()
            self._start(stream, request)
            finished = False
            while not finished:
                output = await stream.get()
                output.request_id = request_id
                finished = output.finished
                yield output
        finally:
            del self._streams[request_id]
            self._stop(stream)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its reader gets a last output with finish reason abort. Unknown ids are left alone."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.aborted = True
        output = self._stop(stream)
        if output is not None:
            stream.put(output)

    def close(self) -> None:
        """Stop the engine; running requests end with EngineDeadError. Harmless when called again."""
        self._core.close()
        self._die("the engine was closed")

    def __enter__(self) -> AsyncLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_alive(self) -> None:
        if self._why_dead is not None:
            raise EngineDeadError(self._why_dead)

    def _start(self, stream: _Stream, request: ProcessedRequest) -> None:
        """Give a request to the core."""
        stream.kind = request.core.sampling_params.output_kind
        self._output.add(request)
        self._readers[stream.core_id] = stream
        if not stream.aborted:
            self._core.add(request.core)
            return
        output = self._output.abort(stream.core_id)
        assert output is not None
        stream.put(output)

    def _stop(self, stream: _Stream) -> RequestOutput | None:
        """Take a request from the core; its last output, or None when it is not there (any more)."""
        self._readers.pop(stream.core_id, None)
        output = self._output.abort(stream.core_id)
        if output is not None:
            self._core.abort(AbortRequest(request_id=stream.core_id))
        return output

    def _from_core(self, news: EngineCoreOutputs) -> None:
        """In the core's thread: hand over to the event loop."""
        if news.outputs:
            self._on_loop(self._deliver, news)

    def _deliver(self, news: EngineCoreOutputs) -> None:
        outputs, aborts = self._output.process(news.outputs)
        for abort in aborts:
            self._core.abort(abort)
        for output in outputs:
            self._readers[output.request_id].put(output)

    def _on_death(self, error: EngineDeadError) -> None:
        """In the core's thread: tell everybody."""
        self._errored = True
        self._die(error.message)

    def _die(self, why: str) -> None:
        self._why_dead = self._why_dead or why
        self._on_loop(self._fail_all, self._why_dead)

    def _fail_all(self, why: str) -> None:
        for stream in self._streams.values():
            self._stop(stream)
            stream.fail(EngineDeadError(why))

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        """Call back in the event loop, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who waits
                self._loop.call_soon_threadsafe(callback, *args)
