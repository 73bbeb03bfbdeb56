"""OpenTelemetry traces: one span per request, with the attributes of the GenAI conventions.

Needs the extra `otel`, so it is imported only where an endpoint is given. Neither prompts nor answers are in a span.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from quire import __version__
from quire.messages.stats import RequestEffort
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

EXPORT_TIMEOUT_S = 3
"""For one batch with its retries; also what an unreachable collector adds to a shutdown."""


class Tracer:
    """Sends spans to a collector, in the background; what does not fit into its queue is dropped."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is the URL that takes OTLP over HTTP, such as http://collector:4318/v1/traces."""
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "quire", "service.version": __version__}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        operation: str,
        model: str,
        request_id: str,
        params: SamplingParams,
        *,
        started_at: float,
        parent: Mapping[str, str],
    ) -> RequestSpan:
        """Open the span of a request; `parent` holds its traceparent and tracestate headers as far as it has them."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model,
            "gen_ai.request.id": request_id,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._propagator.extract(parent),
            SpanKind.SERVER,
            attributes,
            start_time=_wall_ns(started_at),
        )
        return RequestSpan(span, model, request_id, started_at)

    def close(self) -> None:
        """Send what is left; harmless when called again."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request, closed exactly once."""

    def __init__(self, span: object, model: str, request_id: str, started_at: float) -> None:
        self._span = span if isinstance(span, Span) else None
        """None where the caller's trace is not sampled."""
        self._model = model
        self._request_id = request_id
        self._started_at = started_at
        self._num_output_tokens = 0
        self._reasons: dict[int, str] = {}
        self._last: RequestOutput | None = None

    def observe(self, output: RequestOutput) -> None:
        """Take in the next delta, or the one final output."""
        self._last = output
        for completion in output.outputs:
            self._num_output_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self._reasons[completion.index] = completion.finish_reason

    def close(self, error: str | None) -> None:
        """End the span; `error` names what kept the request from finishing."""
        span, output = self._span, self._last
        if span is None:
            return
        span.set_attributes(
            {
                "gen_ai.response.id": self._request_id,
                "gen_ai.response.model": self._model,
                "gen_ai.response.finish_reasons": [self._reasons[index] for index in sorted(self._reasons)],
                "gen_ai.usage.output_tokens": self._num_output_tokens,
                "gen_ai.latency.e2e": time.monotonic() - self._started_at,
            }
        )
        if output is not None:
            span.set_attribute("gen_ai.usage.input_tokens", len(output.prompt_token_ids))
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", output.num_cached_tokens)
            self._add_times(span, output)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()

    def _add_times(self, span: Span, output: RequestOutput) -> None:
        stats = output.metrics
        if stats is None or not stats.first_token_at:
            return
        span.add_event("first token", timestamp=_wall_ns(stats.first_token_at))
        if output.effort is not None:
            _add_phases(span, output.effort)
        span.set_attributes(
            {
                "gen_ai.latency.time_in_queue": stats.scheduled_at - stats.arrived_at,
                "gen_ai.latency.time_to_first_token": stats.first_token_at - self._started_at,
                "gen_ai.latency.time_in_model_prefill": stats.first_token_at - stats.scheduled_at,
                "gen_ai.latency.time_in_model_decode": stats.last_token_at - stats.first_token_at,
                "gen_ai.latency.time_in_model_inference": stats.last_token_at - stats.scheduled_at,
            }
        )


def _add_phases(span: Span, effort: RequestEffort) -> None:
    """An event where each phase begins, and the seconds of each phase and of each reason to wait."""
    for part in effort.spans:
        facts: dict[str, AttributeValue] = {"quire.seconds": part.ended_at - part.started_at}
        if part.num_steps:
            facts |= {"quire.first_step": part.first_step, "quire.steps": part.num_steps}
            facts["quire.tokens"] = part.num_tokens
        span.add_event(part.phase.value, facts, timestamp=_wall_ns(part.started_at))
    for phase, seconds in effort.phase_s.items():
        span.set_attribute(f"quire.phase.{phase.value}", seconds)
    for wait, seconds in effort.held_s.items():
        span.set_attribute(f"quire.waited_for.{wait.value.replace(' ', '_')}", seconds)


def _wall_ns(moment: float) -> int:
    """A moment of `time.monotonic()` as nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - moment) * 1e9)
