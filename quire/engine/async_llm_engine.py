"""`AsyncLLMEngine`: the engine for asyncio programs: `async for output in engine.generate(...)`.

The core steps in a thread of this process (`from_engine_args`) or in a process of its own (`launch`). In the second
case a core that ends is replaced, and every request goes on from the tokens it has: its reader sees a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.engine import QuireConfig
from quire.config.flags.args import EngineArgs
from quire.config.flags.foreign import ASYNC_ENGINE_METHODS, raise_no_attribute, refuse_foreign
from quire.engine.front.admission import Admission, AdmissionLimits
from quire.engine.front.input_processor import InputProcessor, ProcessedRequest, as_params, check_request_id
from quire.engine.front.ongoing_requests import OngoingRequests
from quire.engine.front.seeds import new_seeds, seeds_of_front
from quire.engine.front.startup import FrontParts, load_front
from quire.engine.identity import Identity
from quire.engine.process.client import CoreClient, ProcessCoreClient, ThreadedCoreClient
from quire.engine.process.protocol import CoreConfigured
from quire.engine.process.restart_policy import RestartPolicy
from quire.engine.process.supervisor import (
    CoreDown,
    CoreEvent,
    CoreGone,
    CoreSource,
    CoreStarting,
    CoreSupervisor,
    CoreUp,
)
from quire.engine.request_memory import RequestMemory
from quire.engine.startup import EngineParts, start
from quire.errors import EngineDeadError, EngineUnavailable, QuireError
from quire.inputs import PromptType
from quire.log import get_logger
from quire.messages.kv_tiers import FLUSH_S
from quire.messages.output import EngineCoreOutputs
from quire.messages.stats import Activity, StepStats, continued
from quire.observability.chrome_trace import Trace, chrome_trace
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.structured.grammar import Vocabulary
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.threads import wake_promptly
from quire.utils.work_pool import WorkPool

log = get_logger(__name__)

MAX_TOKENS_CHECKED_HERE = 1024
"""Tokenised prompts up to this length are checked in the event loop, since handing them to a thread takes as long. The
server tokenises in a thread of its own and hands in token ids."""


RECORDING_TIMEOUT_S = 5
"""So long a core may take to say what its flight recorder holds."""


class EngineState(StrEnum):
    """Whether a request would be served."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    """The core is being replaced; requests wait for it."""
    DRAINING = "draining"
    """What is here is finished, nothing new is taken."""
    DEAD = "dead"


class AsyncLLMEngine:
    """One engine: front here, core in a thread or in a process of its own.

    Create it anywhere; use it from one event loop.
    """

    def __init__(
        self,
        core: EngineParts | CoreSource,
        limits: AdmissionLimits | None = None,
        *,
        front: int = 0,
        num_fronts: int = 1,
    ) -> None:
        """`front` is a number that no other front of the same cores has or had; `num_fronts` share their memory."""
        self._seeds = seeds_of_front(front)
        self.last_stats: StepStats | None = None
        """How full the engine is, and what it has done, also in cores that ended; None before it is known, and when
        statistics are off."""
        self.last_stats_at = 0.0
        """When they came, by `time.monotonic()`."""
        self.num_restarts = 0
        """Cores that were replaced."""
        self.stage = ""
        """Of the start or restart of the core, for people; empty while there is a core."""
        self._ended_stats: StepStats | None = None
        """What they had done, as far as they said."""
        self._work = WorkPool()
        """What checks and tokenises prompts that take long."""
        self._requests = OngoingRequests(Admission(limits or AdmissionLimits()))
        self._num_fronts = num_fronts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._errored = False
        self._dead: QuireError | None = None
        self._draining = False
        self._front: FrontParts | None = None
        self._on_front: list[Callable[[], None]] = []
        self._identity: Identity | None = None
        """None until there was a core."""
        self._source: CoreSource | None = None
        """Of cores in other processes."""
        self._follower: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set while the engine is not starting."""
        if isinstance(core, EngineParts):
            self._use_front(core)
            self._identity = core.core.identity
            self._requests.core = ThreadedCoreClient(core.core, self._from_core, self._on_death, self._vocabulary)
            self._settled.set()
        else:
            self._source = core

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLMEngine:
        """Load the model into this process and make ready.

        Raises: ConfigError and its kin.
        """
        return cls(start(args, seeds=new_seeds))

    @classmethod
    def launch(
        cls, args: EngineArgs, *, policy: RestartPolicy | None = None, limits: AdmissionLimits | None = None
    ) -> AsyncLLMEngine:
        """Start the core in a process of its own and return at once; see `wait_ready`."""
        return cls(CoreSupervisor(args, policy), limits)

    @property
    def config(self) -> QuireConfig:
        """What was decided about the engine.

        Raises: EngineUnavailable while it starts.
        """
        return self._parts.config

    @property
    def identity(self) -> Identity:
        """What the engine computes, in every core that it has had.

        Raises: EngineUnavailable until there was one.
        """
        if self._identity is None:
            self._check_alive()
            raise _still_starting()
        return self._identity

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one.

        Raises: EngineUnavailable while the engine starts.
        """
        return self._parts.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        """What tokenises and checks prompts.

        Raises: EngineUnavailable while the engine starts.
        """
        return self._parts.input_processor

    @property
    def default_params(self) -> SamplingParams:
        """What a request without sampling parameters gets.

        Raises: EngineUnavailable while the engine starts.
        """
        return self._parts.input_processor.default_params

    @property
    def state(self) -> EngineState:
        """Whether a request would be served now."""
        if self._dead is not None:
            return EngineState.DEAD
        if self._draining:
            return EngineState.DRAINING
        if self._requests.core is not None:
            return EngineState.READY
        return EngineState.RESTARTING if self._settled.is_set() else EngineState.STARTING

    @property
    def why_dead(self) -> str | None:
        """Why the engine has stopped for good."""
        return None if self._dead is None else self._dead.message

    @property
    def errored(self) -> bool:
        """Whether the engine has stopped by itself."""
        return self._errored

    @property
    def num_unfinished(self) -> int:
        """Requests that have readers."""
        return len(self._requests)

    @property
    def num_queued(self) -> int:
        """Those of them without a first token."""
        return len(self._requests.admission)

    def when_configured(self, call: Callable[[], None]) -> None:
        """Have something called as soon as the configuration and the tokenizer are there, before requests are served.

        That is now, or later in a thread of its own.
        """
        if self._front is None:
            self._on_front.append(call)
        else:
            call()

    async def wait_ready(self) -> None:
        """Return once requests can be served.

        Raises: what kept the engine from starting, a ConfigError for example; EngineDeadError when it has stopped.
        """
        self._bind()
        await self._settled.wait()
        if self._dead is not None:
            raise self._dead

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        tenant: str = "",
        received_at: float = 0.0,
        priority: int = 0,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        data_parallel_rank: None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come, the last one with `finished`. Leaving the loop aborts the request.

        Tenants, the API keys of a server, share the engine evenly. `received_at` is when the request came in, by
        `time.monotonic()`, if that was before this call. `priority` counts with `scheduling_policy="priority"`: of the
        requests of a tenant, lower ones are served first. The keywords after it are vLLM's, and only their defaults
        are taken.

        Raises: RequestError, EngineOverloaded or EngineUnavailable before the first output; EngineDeadError when the
        engine stops; RequestQuarantined when it stops again and again because of this request.
        """
        refuse_foreign(
            {
                "lora_request": lora_request,
                "tokenization_kwargs": tokenization_kwargs,
                "trace_headers": trace_headers,
                "data_parallel_rank": data_parallel_rank,
            }
        )
        received_at = received_at or time.monotonic()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        check_request_id(request_id, self._requests)
        self._check_open()
        self._bind()
        params = as_params(sampling_params)
        stream = self._requests.enter(request_id, tenant, 1 if params is None else params.num_sequences)
        try:
            if not self._settled.is_set():
                await self.wait_ready()
            request = await self._process(stream.core_id, prompt, params, tenant, received_at, priority)
            self._check_alive()
            self._requests.start(stream, request)
            finished = False
            while not finished:
                output = await stream.get()
                output.request_id = request_id
                finished = output.finished
                yield output
        finally:
            self._requests.leave(request_id)

    def check_room(self, tenant: str, *, num_requests: int, num_sequences: int, num_tokens: int) -> None:
        """Refuse requests that belong together before the first of them is queued, if not all may wait.

        Raises: EngineOverloaded.
        """
        requests = self._requests
        requests.admission.check(tenant, num_requests=num_requests, num_sequences=num_sequences, num_tokens=num_tokens)
        requests.memory.check(tenant, num_requests=num_requests, num_tokens=num_tokens)

    async def abort(self, request_id: str) -> None:
        """Stop a request; its reader gets a last output with finish reason abort. Unknown ids are left alone."""
        self._requests.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests keep what they use.

        Raises: EngineDeadError.
        """
        await self.wait_ready()
        if self._requests.core is not None:  # a core that is yet to come has nothing to forget
            await asyncio.wrap_future(self._requests.core.call("reset_prefix_cache"))

    def activity(self, tenant: str) -> asyncio.Future[Activity] | None:
        """What a tenant's requests do in the core, as it will be between two steps; None while there is no core.

        Request ids are the core's: that of `generate`, then `#` and a number; from a core process with `FRONT:` before.
        """
        return None if self._requests.core is None else asyncio.wrap_future(self._requests.core.activity(tenant))

    async def recording(self) -> bytes:
        """The records of the core's last steps and requests, for `chrome_trace`.

        Raises: EngineDeadError; EngineUnavailable while there is no core, and when a step keeps it from answering.
        """
        return await self._read("recording", "; the trace of one that ended is in a file, which the log names")

    async def finished_requests(self) -> bytes:
        """When the core's last requests came and how long they were, for `finished_since`.

        Raises: as `recording`.
        """
        return await self._read("finished_requests", "; try again")

    async def _read(self, method: str, remedy: str) -> bytes:
        self._check_alive()
        self._bind()
        if self._requests.core is None:
            raise EngineUnavailable(f"there is no engine process now{remedy}", retry_after=1)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._requests.core.call(method)), RECORDING_TIMEOUT_S)
        except TimeoutError:
            raise EngineUnavailable(
                f"the engine has not answered for {RECORDING_TIMEOUT_S} s: it answers between two steps", retry_after=1
            ) from None

    async def trace(self) -> Trace:
        """The last steps and requests as a trace in Chrome's JSON format, which ui.perfetto.dev opens.

        Raises: EngineDeadError, EngineUnavailable.
        """
        memory = await self.recording()
        return await self._work.run(partial(chrome_trace, memory, now=time.monotonic()))

    def drain(self) -> None:
        """Take nothing new; what is here goes on to its end."""
        self._draining = True

    async def abort_all(self) -> None:
        """Stop every request."""
        for request_id in list(self._requests):
            self._requests.abort(request_id)

    def close(self, flush_s: float = FLUSH_S) -> None:
        """Stop the engine; running requests end with EngineDeadError. Harmless when called again.

        An engine process has `flush_s` seconds to write what is cached to its `kv_disk` file, if it has one.
        """
        if self._source is not None:
            self._source.close(flush_s)
            self._on_loop(self._disconnect)
        elif self._requests.core is not None:
            self._requests.core.close()
        self._die(EngineDeadError("the engine was closed"))
        self._work.close()
        if self._front is not None:
            self._front.input_processor.grammars.close()

    if not TYPE_CHECKING:  # type checkers refuse what is not there by themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise_no_attribute(self, name, ASYNC_ENGINE_METHODS)

    def __enter__(self) -> AsyncLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _parts(self) -> FrontParts:
        if self._front is None:
            self._check_alive()
            raise _still_starting()
        return self._front

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(self._dead.message)

    def _check_open(self) -> None:
        self._check_alive()
        if self._draining:
            raise EngineUnavailable("the server is shutting down; another one may serve this request", retry_after=1)

    def _bind(self) -> None:
        """Use the running event loop; a core process can speak to one loop only."""
        loop, is_first = asyncio.get_running_loop(), self._loop is None
        if is_first:
            wake_promptly()
        if self._source is not None and is_first:
            self._loop = loop
            self._follower = loop.create_task(self._follow(self._source), name="quire-core-events")
        if self._source is not None and loop is not self._loop:
            raise EngineDeadError("this engine's core process belongs to the event loop that used it first")
        self._loop = loop

    def _vocabulary(self) -> Vocabulary:
        """For a core that is to run its first request with a grammar."""
        return self._parts.input_processor.grammars.vocabulary()

    def _use_front(self, front: FrontParts) -> None:
        self._front = front
        self._requests.output_processor = front.output_processor
        self._requests.memory = RequestMemory(front.config.scheduler_config.max_request_bytes // self._num_fronts)

    async def _process(
        self,
        core_id: str,
        prompt: PromptType,
        params: SamplingParams | None,
        tenant: str,
        received_at: float,
        priority: int,
    ) -> ProcessedRequest:
        """Check and complete a request: in a thread, unless the thread would cost more than the work."""
        process = self._parts.input_processor.process
        token_ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
        has_lists = params is not None and (
            params.bad_words
            or params.allowed_token_ids
            or params.structured_outputs is not None
            or params.thinking_token_budget is not None
            or params.gate is not None
        )
        if isinstance(token_ids, list) and len(token_ids) <= MAX_TOKENS_CHECKED_HERE and not has_lists:
            return process(core_id, prompt, params, tenant, received_at, priority)
        try:
            return await self._work.run(process, core_id, prompt, params, tenant, received_at, priority)
        except EngineUnavailable:
            self._check_alive()
            raise

    def _from_core(self, news: EngineCoreOutputs) -> None:
        """In the core's thread: hand over to the event loop."""
        self._on_loop(self._deliver, news)

    def _deliver(self, news: EngineCoreOutputs) -> None:
        if news.stats is not None:
            ended = self._ended_stats
            self.last_stats = news.stats if ended is None else continued(ended, news.stats)
            self.last_stats_at = time.monotonic()
        if news.outputs:
            self._requests.deliver(news)

    async def _follow(self, source: CoreSource) -> None:
        """Connect to one core after the other."""
        events: asyncio.Queue[CoreEvent] = asyncio.Queue()
        sink = partial(self._on_loop, events.put_nowait)
        source.subscribe(sink)
        try:
            while self._dead is None:
                match await events.get():
                    case CoreConfigured() as event if self._front is None:
                        self._use_front(await asyncio.to_thread(load_front, event.config, seeds=self._seeds))
                        for call in self._on_front:
                            await asyncio.to_thread(call)
                    case CoreUp() as event:
                        try:
                            await self._core_up(event, lost=lambda: source.subscribe(sink))
                        except OSError:  # the core has ended already, as the next event says
                            event.connection.close()
                    case CoreStarting() as event:
                        self.stage = event.stage
                    case CoreDown() as event:
                        self._core_down(event)
                    case CoreGone() as event:
                        self._errored = True
                        self._die(event.error)
        except QuireError as error:
            self._errored = True
            self._die(error)
            await asyncio.to_thread(source.close)
        finally:
            self._disconnect()
            while not events.empty():
                event = events.get_nowait()
                if isinstance(event, CoreUp):
                    event.connection.close()

    async def _core_up(self, event: CoreUp, lost: Callable[[], None]) -> None:
        """Take a new core into use; it gets every request with the tokens it has."""
        client = ProcessCoreClient(
            self._deliver, self._requests.suspects.try_alone, lambda: self._core_lost(client, lost), self._vocabulary
        )
        await client.connect(event.connection)
        self._disconnect()
        self._identity = event.identity
        self.stage = ""
        self._requests.move_to(client)
        self._settled.set()

    def _core_lost(self, client: CoreClient, reconnect: Callable[[], None]) -> None:
        """The connection has ended, mostly with the core, as CoreDown will say; else there is another one to get."""
        if client is self._requests.core:
            self._requests.core = None
            reconnect()

    def _core_down(self, event: CoreDown) -> None:
        self._disconnect()
        self.stage = "pause before the restart"
        self.num_restarts += 1
        self._ended_stats = self.last_stats
        self._requests.core_ended(event.reason, crashed=event.crashed)

    def _disconnect(self) -> None:
        core, self._requests.core = self._requests.core, None
        if core is not None:
            core.close()

    def _on_death(self, error: EngineDeadError) -> None:
        """In the core's thread: tell everybody."""
        self._errored = True
        self._die(error)

    def _die(self, error: QuireError) -> None:
        self._dead = self._dead or error
        self._on_loop(self._fail_all, self._dead.message)

    def _fail_all(self, why: str) -> None:
        self._settled.set()
        self._requests.fail_all(why)

    def _on_loop(self, callback: Callable[..., None], *args: object) -> None:
        """Call back in the event loop, from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left who waits
                self._loop.call_soon_threadsafe(callback, *args)


def _still_starting() -> EngineUnavailable:
    return EngineUnavailable("the engine is starting; try again in a moment", retry_after=1)
