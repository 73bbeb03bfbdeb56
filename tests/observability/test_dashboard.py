"""The dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import create_config
from quire.messages.stats import Constraint, StepStats
from quire.observability.prometheus import Metrics

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/quire.json"
METRIC = re.compile(r"\b(?:quire:|vllm:|http_)[a-z0-9_]+")


def expressions() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for variable in dashboard["templating"]["list"]:
        yield variable["query"]
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])


@pytest.fixture(scope="module")
def families() -> dict[str, Any]:
    metrics = Metrics(create_config(EngineArgs()), "model")
    metrics.finished("stop")
    metrics.refused("queue")
    metrics.http_requests.labels("/", "GET", "2xx").inc()
    text = metrics.expose(StepStats(num_steps=1, constraint_steps={Constraint.KV_CACHE: 1}), 0).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_every_expression_names_metrics_that_exist(families: dict[str, Any]) -> None:
    known = {sample.name: set(sample.labels) for family in families.values() for sample in family.samples}
    asked = [(name, text) for text in expressions() for name in METRIC.findall(text)]
    assert len(asked) > 30
    for name, text in asked:
        assert name in known, text
        for by in re.findall(r"by \((\w+)\)", text):
            assert by in known[name], text


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


def test_every_family_has_its_compatible_twin_with_the_same_samples(families: dict[str, Any]) -> None:
    own = [name for name in families if name.startswith("quire:")]
    assert len(own) > 25
    for name in own:
        twin = families["vllm:" + name.removeprefix("quire:")]
        assert [sample.value for sample in twin.samples] == [sample.value for sample in families[name].samples]


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("iteration_tokens_total", [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]),
        ("request_params_n", [1, 2, 5, 10, 20]),
        ("request_num_preemptions", [1, 2, 3, 4, 5, 10, 20]),
    ],
)
def test_histograms_have_the_buckets_that_dashboards_know(
    families: dict[str, Any], name: str, bounds: list[float]
) -> None:
    samples = families["vllm:" + name].samples
    found = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
    assert found == [*bounds, float("inf")]


def test_steps_are_counted_by_their_tokens_and_counters_never_fall() -> None:
    metrics = Metrics(create_config(EngineArgs()), "m")
    for hits, steps in ((5, {1: 3, 8: 2}), (2, {1: 1}), (9, {1: 4, 8: 2, 16: 1})):
        total = sum(steps.values())
        stats = StepStats(
            num_steps=total, prefix_cache_hits=hits, steps_by_tokens=steps, num_computed_tokens=sum(steps) * total
        )
        text = metrics.expose(stats, 0).decode()
        found = {name: float(value) for name, value in re.findall(r"^quire:(\S+?)(?:\{.*?\})? (\S+)$", text, re.M)}
        assert found["prefix_cache_hits_total"] == max(hits, 5)
        assert found["iteration_tokens_total_count"] == max(total, 5)
    buckets = re.findall(r'quire:iteration_tokens_total_bucket\{.*le="([^"]+)".*\} (\S+)', text)
    assert [(bound, float(count)) for bound, count in buckets][:4] == [("1.0", 4), ("8.0", 6), ("16.0", 7), ("32.0", 7)]


def test_what_tiers_have_done_is_counted() -> None:
    metrics = Metrics(create_config(EngineArgs()), "m")
    metrics.expose(StepStats(num_steps=1, tier_hit_tokens=16, num_tier_loads=1, num_tier_saves=5), 0)
    stats = StepStats(num_steps=2, tier_hit_tokens=48, num_tier_loads=3, num_tier_saves=9, num_tier_failures=1)
    text = metrics.expose(stats, 0).decode()
    found = {name: float(value) for name, value in re.findall(r"^quire:kv_tier_(\w+)_total\{.*?\} (\S+)$", text, re.M)}
    assert found == {"hit_tokens": 48, "loads": 3, "saves": 9, "failures": 1}
