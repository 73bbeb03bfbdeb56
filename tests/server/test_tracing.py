"""Traces: a collector that takes OTLP over HTTP gets one span per request."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quire.errors import ConfigError, MissingDependency
from quire.server.settings import ServerSettings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """What was sent to a port of this machine."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        self.thread = Thread(target=self.server.serve_forever)
        self.thread.start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            self.resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_a_request_is_a_span_in_its_callers_trace(serve: Any, collector: Collector) -> None:
    with serve(otlp_traces_endpoint=collector.url) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 4, "n": 2, "temperature": 0.5}
        reply = server.client.post("/v1/chat/completions", json=body, headers=headers).json()
        server.post("/v1/completions", prompt="another secret", max_tokens=2, stream=True)
    chat, completion = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert collector.resource["service.name"] == "quire"
    assert (chat.trace_id.hex(), chat.parent_span_id.hex()) == (TRACE, PARENT)
    assert chat.name == "chat quire-tiny"
    found = attributes(chat)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.max_tokens"] == 4
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.input_tokens"] == reply["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == reply["usage"]["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == [choice["finish_reason"] for choice in reply["choices"]]
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]
    assert [each.name for each in chat.events] == ["first token", "queued", "prefill", "decode"]
    assert found["quire.phase.decode"] > 0 < found["quire.waited_for.next_step"]
    assert chat.start_time_unix_nano <= chat.events[0].time_unix_nano <= chat.end_time_unix_nano
    assert completion.name == "text_completion quire-tiny"
    assert not completion.parent_span_id
    assert b"secret" not in b"".join(span.SerializeToString() for span in collector.spans)


def test_a_caller_that_does_not_sample_is_not_traced(serve: Any, collector: Collector) -> None:
    with serve(otlp_traces_endpoint=collector.url) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        reply = server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        assert reply.status_code == 200
    assert collector.spans == []


def test_a_refused_request_is_an_error_in_the_trace(serve: Any, collector: Collector) -> None:
    with serve(otlp_traces_endpoint=collector.url) as server:
        server.engine.drain()
        try:
            assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 503
        finally:
            server.engine._draining = False
    (span,) = collector.spans
    assert attributes(span)["error.type"] == "EngineUnavailable"


def test_an_endpoint_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be a URL"):
        ServerSettings(otlp_traces_endpoint="localhost:4317")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"quire\[otel\]"):
        ServerSettings(otlp_traces_endpoint="http://localhost:4318/v1/traces")


def test_a_collector_that_is_not_there_harms_nobody(serve: Any) -> None:
    with serve(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200
