"""What every route needs: the engine, the settings, the metrics, and who is asking."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import Scope

from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.engine.identity import Identity
from quire.errors import EngineError, RequestError, UnsupportedFeature
from quire.log import get_logger
from quire.message_formats.choice import Choice, choose
from quire.message_formats.format import MessageFormat
from quire.message_formats.formats import calls_of, thinking_of
from quire.message_formats.marks import Marks
from quire.message_formats.thinking import marked_thinking
from quire.observability.prometheus import Metrics
from quire.observability.samples import Samples, add_samples
from quire.server.activity import ActivityReports
from quire.server.http.body_budget import BodyBudget
from quire.server.http.errors import ApiError
from quire.server.processes.link import FrontReport
from quire.server.processes.peers import Alone, Peers
from quire.server.settings import ServerSettings
from quire.tokenizer.chat import ChatTemplate, has_chat_template, load_chat_template
from quire.tokenizer.template_doctor import REASONING_PARTS, dropped_parts
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.work_pool import WorkPool

if TYPE_CHECKING:
    from quire.observability.tracing import Tracer


log = get_logger(__name__)
EXTENSION = "quire.stream"
"""Of a scope, by a connection: its `write` sends a piece of a chunked body."""


@dataclass(slots=True)
class Context:
    """One HTTP request, as the middleware leaves it in the scope for the routes."""

    write: Callable[[bytes], Awaitable[None]]
    """Sends a piece of a stream's body. What wraps `send` on the way looks at the start of a reply, so that the pieces
    need not pass through it, token by token."""
    label: str
    """The client's X-Request-Id as far as it is harmless, or one made here; shown, never used as a key."""
    key: int = -1
    """Which API key it carries; -1 without keys."""
    tenant: str | None = None
    """What sets the cached prefixes of this API key apart from those of others."""
    wants_receipt: bool = False
    """The client asks for what reproduces the answer."""
    wants_why: bool = False
    """The client asks where the time went."""
    trace_parent: dict[str, str] = field(default_factory=dict)
    """The client's traceparent and tracestate headers."""
    started_at: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engine_tenant(self) -> str:
        """Whose request it is, as the engine knows clients: requests of one API key are one tenant's."""
        return str(self.key)


def _chosen(name: str, found: str | None) -> str | None:
    return found if name == "auto" else None if name == "none" else name


def _load_tracer(endpoint: str) -> Tracer:
    from quire.observability.tracing import Tracer

    return Tracer(endpoint)


def context_of(scope: Scope) -> Context:
    """The context of a request that came through the middleware."""
    context = scope["quire"]
    assert isinstance(context, Context)
    return context


class Service:
    """The engine as the routes see it. Holds nothing about any one request."""

    def __init__(self, engine: AsyncLLMEngine, settings: ServerSettings, peers: Peers | None = None) -> None:
        self.engine = engine
        self.settings = settings
        self.peers = Alone(len(settings.api_key)) if peers is None else peers
        self._metrics: Metrics | None = None
        self._making_metrics = threading.Lock()
        self.peers.answer_with(self._report)
        self.created = int(time.time())
        self.work = WorkPool(
            max_waiting=settings.max_queued_work,
            max_waiting_per_owner=settings.max_queued_work // 2 if len(settings.api_key) > 1 else 0,
        )
        """What reads, renders and tokenises requests, and builds large replies."""
        self.work.on_refused = self._count_refused_work
        self.body_budget = BodyBudget(settings.max_total_body_size)
        self.activity = ActivityReports(engine)
        """What the requests of each API key do, for the console."""
        self.num_traces = 0
        """Replies of /v1/trace that are being made or sent."""
        self.tracer = None if settings.otlp_traces_endpoint is None else _load_tracer(settings.otlp_traces_endpoint)

    def close(self) -> None:
        """Give up unfinished work, and send what is still to be traced. Idempotent."""
        self.work.close()
        if self.tracer is not None:
            self.tracer.close()

    def count_refused(self) -> None:
        """Count a reply to what was no request yet: no HTTP, or beyond the limits of a connection."""
        if self.is_configured:
            self.metrics.http_requests.labels("none", "other", "4xx").inc()

    def _count_refused_work(self) -> None:
        if self.is_configured:
            self.metrics.refused("work")

    async def reports(self) -> tuple[FrontReport, Samples]:
        """The whole server, whichever front is asked: what it does, and what all fronts but this one have counted.

        Raises: ApiError 503 when the others cannot be asked.
        """
        others = await self.peers.reports()
        counted: Samples = {}
        for report in others:
            add_samples(counted, report.samples)
        fronts = [self._state(), *others]
        known = [report.stats for report in fronts if report.stats is not None]
        whole = FrontReport(
            num_unfinished=sum(report.num_unfinished for report in fronts),
            num_queued=sum(report.num_queued for report in fronts),
            num_restarts=max(report.num_restarts for report in fronts),
            stats=max(known, key=lambda stats: stats.num_steps, default=None),  # a young front has missed cores
        )
        return whole, counted

    def _state(self) -> FrontReport:
        engine = self.engine
        return FrontReport(
            num_unfinished=engine.num_unfinished,
            num_queued=engine.num_queued,
            num_restarts=engine.num_restarts,
            stats=engine.last_stats,
        )

    def _report(self) -> FrontReport:
        report = self._state()
        if self.is_configured:
            report.samples = self.metrics.samples()
        return report

    @property
    def is_configured(self) -> bool:
        """Whether the engine has come so far that its config and tokenizer are known."""
        try:
            return self.engine.config is not None
        except EngineError:
            return False

    @property
    def metrics(self) -> Metrics:
        """What is counted; needs the config, so it is made when it is first used, once, whichever thread is first."""
        if self._metrics is None:
            with self._making_metrics:
                if self._metrics is None:
                    metrics = Metrics(self.engine.config, self.names[0])
                    metrics.queued_work.set_function(lambda: self.work.num_waiting)
                    metrics.running_work.set_function(lambda: self.work.num_running)
                    self._metrics = metrics
        return self._metrics

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names under which the model is listed; a local directory is listed without its path."""
        model = self.engine.config.model_config.model
        return self.settings.served_model_name or (Path(model).name if Path(model).is_dir() else model,)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for servers that give equal answers: a short form of the engine's identity."""
        return f"fp_{self.engine.identity.digest.hex()[:12]}"

    @property
    def identity(self) -> Identity:
        """What the engine computes, under the name that clients know."""
        return replace(self.engine.identity, model=self.names[0])

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises: UnsupportedFeature when the engine runs without one.
        """
        if self.engine.tokenizer is None:
            raise UnsupportedFeature(
                "This server has no tokenizer (--skip-tokenizer-init): send token ids to /v1/completions.",
                parameter="prompt",
            )
        return self.engine.tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template of conversations.

        Raises: UnsupportedFeature when there is none.
        """
        return load_chat_template(self.tokenizer, self.engine.config.model_config.chat_template)

    @cached_property
    def tool_template(self) -> ChatTemplate:
        """The template of conversations with tools; some models have one of its own."""
        return load_chat_template(self.tokenizer, self.engine.config.model_config.chat_template, with_tools=True)

    @cached_property
    def dropped_parts(self) -> frozenset[str]:
        """The parts of conversations that the chat template leaves out."""
        return dropped_parts(self.tool_template)

    @property
    def has_conversations(self) -> bool:
        """Whether there is a chat template."""
        return has_chat_template(self.engine.tokenizer, self.engine.config.model_config.chat_template)

    @property
    def reads_calls(self) -> bool:
        """Whether the model is shown tools, and its calls are told from text."""
        has_format = self.has_conversations and self.message_format.calls is not None
        return has_format and "tools" in self.tool_template.names

    @property
    def reads_thinking(self) -> bool:
        """Whether thinking is told from the answer."""
        return self.has_conversations and self.message_format.thinking is not None

    def describe_conversations(self) -> None:
        """Say how conversations are written and read: to the engine, for budgets of prompts that are no conversations,
        and in the log, with what the chat template leaves out."""
        if not self.has_conversations:
            return
        try:
            marked = marked_thinking(self.message_format, self.marks, self.tokenizer)
            self.engine.input_processor.thinking = marked
            for part in sorted(self.dropped_parts - REASONING_PARTS):
                log.warning("the chat template leaves out %s; requests that have them are told so in warnings", part)
        except RequestError as error:
            log.warning("the chat template cannot be used: %s", error.message)
            return
        chosen = self._chosen_formats
        log.info("formats of messages tool_calls=%s thinking=%s (%s)", chosen.calls, chosen.thinking, chosen.why)

    @cached_property
    def message_format(self) -> MessageFormat:
        """How the model writes thinking and tool calls."""
        calls, thinking = self._chosen_formats.calls, self._chosen_formats.thinking
        return MessageFormat(
            calls=None if calls is None else calls_of(calls, self.tokenizer),
            thinking=None if thinking is None else thinking_of(thinking, self.tokenizer),
        )

    @cached_property
    def _chosen_formats(self) -> Choice:
        given = self.settings.tool_call_parser, self.settings.reasoning_parser
        found = choose(self.tool_template.source, self.tokenizer)
        why = found.why if given == ("auto", "auto") else "as the flags say"
        return Choice(_chosen(given[0], found.calls), _chosen(given[1], found.thinking), why)

    @cached_property
    def marks(self) -> Marks:
        """The markers of `message_format`."""
        return Marks(self.message_format.markers, self.tokenizer)

    def check_model(self, given: str | None, *, is_given: bool = True) -> str:
        """The name to show in a reply; a request that names no model gets the one there is.

        Raises: ApiError 404.
        """
        if not is_given or given in self.names or given == self.engine.config.model_config.model:
            return given or self.names[0]
        name = "null" if given is None else repr(given[:128])[1:-1]
        raise ApiError(
            404,
            "model_not_found",
            f"The model `{name}` does not exist. Available: {', '.join(self.names)}.",
            param="model",
        )
