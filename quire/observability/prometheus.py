"""Prometheus metrics: `quire:` names, and the same series under `vllm:` names that dashboards and scalers read.

The engine fills plain `StepStats` and `RequestStats`; this module reads them from outside. Labels are never text that
a client sent, so the number of series is bounded.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Sample

from quire.config.engine import QuireConfig
from quire.messages.stats import StepStats
from quire.observability.samples import Samples, Series
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OWN, COMPATIBLE = "quire:", "vllm:"

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)  # fmt: skip
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
                20, 40, 80)  # fmt: skip
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_ITERATION = (1, *(2**power for power in range(3, 15)))
_LABELS = ("model_name", "engine")


def _up_to(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 ... as far as a count of tokens can go."""
    steps = (mantissa * 10**exponent for exponent in range(9) for mantissa in (1, 2, 5))
    return [float(step) for step in steps if step <= max(limit, 1)]


class _Whole:
    """The metrics of a core and of its fronts, under their own and under the compatible names."""

    def __init__(self, core: CollectorRegistry, front: CollectorRegistry, others: Samples) -> None:
        self._core = core
        self._front = front
        self._others = others

    def collect(self) -> Iterator[Metric]:
        mine = (_added(metric, self._others.get(metric.name, {})) for metric in self._front.collect())
        for metric in chain(self._core.collect(), mine):
            yield metric
            if metric.name.startswith(OWN):
                yield _renamed(metric)


def _added(metric: Metric, others: dict[Series, float]) -> Metric:
    """One front's counts and those of the others."""
    if others:
        values = {_series(sample): sample.value for sample in metric.samples}
        for series, value in others.items():
            values[series] = values.get(series, 0.0) + value
        metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return metric


def _series(sample: Sample) -> Series:
    return sample.name, tuple(sample.labels.items())


def _renamed(metric: Metric) -> Metric:
    twin = Metric(COMPATIBLE + metric.name.removeprefix(OWN), metric.documentation, metric.type, metric.unit)
    twin.samples = [Sample(COMPATIBLE + s.name.removeprefix(OWN), *s[1:]) for s in metric.samples]
    return twin


class _TokenTimes:
    """Tokens and the times between them. prometheus_client's own counters cost as much as all else that is done for a
    token (benchmarks/serving.md), so these are plain numbers, read when somebody asks."""

    def __init__(self, values: tuple[str, str]) -> None:
        self._values = values
        self._num_tokens = 0
        self._counts = [0] * (len(_INTER_TOKEN) + 1)
        self._total_s = 0.0

    def first(self, num_tokens: int) -> None:
        """Tokens that nothing went before."""
        self._num_tokens += num_tokens

    def next(self, num_tokens: int, elapsed_s: float) -> None:
        """Tokens that came together, this long after those before them."""
        self._num_tokens += num_tokens
        each_s = elapsed_s / num_tokens
        self._counts[bisect_left(_INTER_TOKEN, each_s)] += 1
        self._total_s += each_s

    def collect(self) -> Iterator[Metric]:
        generated = CounterMetricFamily(f"{OWN}generation_tokens", "Tokens generated.", labels=_LABELS)
        generated.add_metric(self._values, self._num_tokens)
        yield generated
        name, text = f"{OWN}inter_token_latency_seconds", "Token to token."
        between = HistogramMetricFamily(name, text, labels=_LABELS)
        between.add_metric(self._values, _cumulated(_INTER_TOKEN, self._counts), self._total_s)
        yield between


class _StepTokens:
    """How many tokens the steps of the core had."""

    def __init__(self, values: tuple[str, str]) -> None:
        self._values = values
        self._counts = [0] * (len(_ITERATION) + 1)
        self._num_tokens = 0

    def add(self, before: StepStats, after: StepStats) -> None:
        """Take in what happened between two states of one core."""
        for bound, count in after.steps_by_tokens.items():
            self._counts[bisect_left(_ITERATION, bound)] += count - before.steps_by_tokens.get(bound, 0)
        self._num_tokens += after.num_computed_tokens - before.num_computed_tokens

    def collect(self) -> Iterator[Metric]:
        steps = HistogramMetricFamily(f"{OWN}iteration_tokens_total", "Tokens of a step.", labels=_LABELS)
        steps.add_metric(self._values, _cumulated(_ITERATION, self._counts), self._num_tokens)
        yield steps


def _cumulated(bounds: Iterable[float], counts: list[int]) -> list[tuple[str, float]]:
    """(upper bound, how many are at most that), as a histogram shows them; the last bound is infinity."""
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


_TIER_COUNTS = {
    "tier_hit_tokens": "Tokens that pages from --kv-ram and --kv-disk spared.",
    "num_tier_loads": "Pages loaded from there.",
    "num_tier_saves": "Pages saved there.",
    "num_tier_failures": "Pages there that were not what they should be.",
}
"""By field of `StepStats`."""


class Metrics:
    """Everything that is counted about one engine and its server, by one of the server's fronts."""

    def __init__(self, config: QuireConfig, model_name: str) -> None:
        # A time stamp beside every series, which nobody reads:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        """What this front counts."""
        self._core_registry = CollectorRegistry()
        """What the core counts, and tells every front."""
        self._values = (model_name, "0")
        self.tokens = _TokenTimes(self._values)
        self._step_tokens = _StepTokens(self._values)
        self._registry.register(self.tokens)
        self._core_registry.register(self._step_tokens)
        tokens = _up_to(config.model_config.max_model_len)
        self.running = self._gauge("num_requests_running", "Sequences in the running batch.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait for the batch.")
        self.sequences = self._gauge("num_sequences", "Sequences of requests in progress, waiting ones included.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self.restarts = self._gauge("engine_restarts", "Engine cores that were replaced.")
        self.queued_work = self._front_gauge("front_work_waiting", "Requests that wait to be read and tokenised.")
        self.running_work = self._front_gauge("front_work_running", "Requests that are read and tokenised.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", core=True)
        self.prefix_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", core=True)
        self.tiers = {
            name: self._counter(f"kv_{name.removeprefix('num_')}", text, core=True)
            for name, text in _TIER_COUNTS.items()
        }
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that were started.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens that came from the prefix cache.")
        self.preemptions = self._counter("num_preemptions", "Times a request was preempted.")
        self.success = Counter(
            f"{OWN}request_success",
            "Requests by how they ended.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.rejections = Counter(
            f"{OWN}admission_rejections", "Requests that were refused for load.", ("model_name", "reason"),
            registry=self._registry,
        )  # fmt: skip
        self.first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", _INTER_TOKEN
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to the first step.", _REQUEST)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "First step to first token.", _REQUEST)
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token.", _REQUEST)
        self.inference_time = self._histogram("request_inference_time_seconds", "First step to last token.", _REQUEST)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self.request_generation = self._histogram("request_generation_tokens", "Output tokens of a request.", tokens)
        self.longest_generation = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest completion.", tokens
        )
        self.params_n = self._histogram("request_params_n", "Completions a request asked for.", (1, 2, 5, 10, 20))
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "Output tokens a request asked for at most.", tokens
        )
        self.prefill_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Tokens computed before or between output tokens.", tokens
        )
        self.request_preemptions = self._histogram(
            "request_num_preemptions", "Times a request was preempted.", (1, 2, 3, 4, 5, 10, 20)
        )
        self.prompt_sources = Counter(
            f"{OWN}prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            (*_LABELS, "source"),
            registry=self._registry,
        )
        self.constraints = Counter(
            f"{OWN}engine_steps", "Steps by what kept them from holding more.", (*_LABELS, "constraint"),
            registry=self._core_registry,
        )  # fmt: skip
        self.http_requests = Counter(
            "http_requests", "HTTP requests.", ("handler", "method", "status"), registry=self._registry
        )
        self.http_time = Histogram(
            "http_request_duration_seconds", "HTTP requests from headers to end.", ("handler", "method"),
            registry=self._registry, buckets=_REQUEST,
        )  # fmt: skip
        cache = config.cache_config
        info = {"block_size": cache.block_size, "num_gpu_blocks": cache.num_blocks}
        facts = Gauge(f"{OWN}cache_config_info", "The KV cache.", (*info, "engine"), registry=self._core_registry)
        facts.labels(*map(str, info.values()), "0").set(1)
        self._seen = StepStats()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(OWN + name, text, _LABELS, registry=self._core_registry).labels(*self._values)

    def _front_gauge(self, name: str, text: str) -> Gauge:
        return Gauge(OWN + name, text, _LABELS, registry=self._registry).labels(*self._values)

    def _counter(self, name: str, text: str, *, core: bool = False) -> Counter:
        registry = self._core_registry if core else self._registry
        return Counter(OWN + name, text, _LABELS, registry=registry).labels(*self._values)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(OWN + name, text, _LABELS, registry=self._registry, buckets=tuple(buckets))
        return made.labels(*self._values)

    def prompt_tokens_of(self, source: str, count: int) -> None:
        """Count prompt tokens; source is one of a closed set."""
        self.prompt_sources.labels(*self._values, source).inc(count)

    def refused(self, reason: str) -> None:
        """Count a request that was refused for load; reason is one of a closed set."""
        self.rejections.labels(self._values[0], reason).inc()

    def finished(self, reason: str) -> None:
        """Count the end of a request."""
        self.success.labels(*self._values, reason).inc()

    def samples(self) -> Samples:
        """What this front has counted, for another front to add to its own."""
        return {metric.name: {_series(s): s.value for s in metric.samples} for metric in self._registry.collect()}

    def expose(self, stats: StepStats | None, num_restarts: int, others: Samples | None = None) -> bytes:
        """The text that a scraper reads: of this front and, where there are some, of the others."""
        self.restarts.set(num_restarts)
        if stats is not None:
            self.running.set(stats.num_running)
            self.waiting.set(stats.num_waiting)
            self._count_totals(stats)
            used = stats.num_total_blocks - stats.num_free_blocks
            self.kv_usage.set(used / stats.num_total_blocks if stats.num_total_blocks else 0)
        return generate_latest(_Whole(self._core_registry, self._registry, others or {}))

    def _count_totals(self, stats: StepStats) -> None:
        """Counters never fall, though the one who knew most may have gone."""
        seen = self._seen
        if stats.num_steps < seen.num_steps:
            return
        for constraint, count in stats.constraint_steps.items():
            new = count - seen.constraint_steps.get(constraint, 0)
            self.constraints.labels(*self._values, constraint.value).inc(new)
        self.prefix_queries.inc(stats.prefix_cache_queries - seen.prefix_cache_queries)
        self.prefix_hits.inc(stats.prefix_cache_hits - seen.prefix_cache_hits)
        for name, counter in self.tiers.items():
            counter.inc(getattr(stats, name) - getattr(seen, name))
        self._step_tokens.add(seen, stats)
        self._seen = stats


@dataclass(slots=True)
class RequestRecord:
    """The one record of a request: filled as its outputs come, closed exactly once."""

    metrics: Metrics
    params: SamplingParams
    arrived_at: float = field(default_factory=time.monotonic)
    last_at: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    lengths: dict[int, int] = field(default_factory=dict)
    """Output tokens by completion, where there are several."""
    failed: bool = False
    """A completion has ended with an error."""
    reason: str = "abort"
    """How it ended: stop, length, abort or error."""

    def observe(self, output: RequestOutput) -> int:
        """Take in an output; how many tokens it has."""
        now = time.monotonic()
        metrics = self.metrics
        count = 0
        for completion in output.outputs:
            count += len(completion.token_ids)
            if completion.finish_reason == "error":
                self.failed = True
        if self.last_at and count:
            metrics.tokens.next(count, now - self.last_at)
        elif not self.last_at:
            metrics.tokens.first(count)
            self.num_prompt_tokens, self.num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
            metrics.prompt_tokens.inc(self.num_prompt_tokens)
            metrics.cached_tokens.inc(self.num_cached_tokens)
            metrics.prompt_tokens_of("local_cache_hit", self.num_cached_tokens)
            metrics.prompt_tokens_of("local_compute", self.num_prompt_tokens - self.num_cached_tokens)
        self.last_at = now
        self.num_output_tokens += count
        if self.params.n > 1:
            for completion in output.outputs:
                self.lengths[completion.index] = self.lengths.get(completion.index, 0) + len(completion.token_ids)
        if output.finished:
            self._finish(output)
        return count

    def close(self) -> None:
        """Count the end."""
        self.metrics.finished(self.reason)

    def _finish(self, output: RequestOutput) -> None:
        reasons = [completion.finish_reason for completion in output.outputs]
        self.reason = next((reason for reason in reasons if reason is not None), "stop")
        stats, metrics = output.metrics, self.metrics
        metrics.request_prompt.observe(self.num_prompt_tokens)
        metrics.request_generation.observe(self.num_output_tokens)
        metrics.longest_generation.observe(max(self.lengths.values(), default=self.num_output_tokens))
        metrics.params_n.observe(self.params.n)
        if self.params.max_tokens is not None:
            metrics.params_max_tokens.observe(self.params.max_tokens)
        if output.effort is not None:
            metrics.prefill_computed.observe(output.effort.num_computed_tokens)
        metrics.e2e.observe(self.last_at - self.arrived_at)
        if stats is None or not stats.first_token_at:
            return
        metrics.preemptions.inc(stats.num_preemptions)
        metrics.request_preemptions.observe(stats.num_preemptions)
        metrics.first_token.observe(stats.first_token_at - stats.arrived_at)
        metrics.queue_time.observe(stats.scheduled_at - stats.arrived_at)
        metrics.prefill_time.observe(stats.first_token_at - stats.scheduled_at)
        metrics.decode_time.observe(stats.last_token_at - stats.first_token_at)
        metrics.inference_time.observe(stats.last_token_at - stats.scheduled_at)
        if stats.num_generation_tokens > 1:
            between = stats.last_token_at - stats.first_token_at
            metrics.per_token.observe(between / (stats.num_generation_tokens - 1))
