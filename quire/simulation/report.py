"""The figures of a simulation, under the names that `quire bench serve` gives to those of a server."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from quire.simulation.run import Outcome, Result
from quire.utils.math import percentile

PERCENTILES = (50, 95, 99)
METRICS = {"ttft": "time to first token", "tpot": "time per output token after the first", "e2el": "time to the end"}


def report(
    outcome: Outcome, *, num_prompt_tokens: int, num_output_tokens: int, goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Rates, latencies in ms, and how full the caches were. `goodput`: metric -> limit in ms."""
    results = outcome.results
    duration = max(result.ended_at for result in results) - min(result.arrived_at for result in results)
    figures: dict[str, Any] = {
        "num_requests": len(results),
        "num_replicas": len(outcome.replicas),
        "duration": duration,
        "total_input_tokens": num_prompt_tokens,
        "total_output_tokens": num_output_tokens,
        "request_throughput": len(results) / duration,
        "request_goodput": sum(_is_good(result, goodput) for result in results) / duration,
        "output_throughput": num_output_tokens / duration,
    }
    for name, values in times_ms(results).items():
        if values:
            figures[f"mean_{name}_ms"] = statistics.fmean(values)
            figures |= {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTILES}
    return figures | _of_engines(outcome, duration)


def times_ms(results: list[Result]) -> dict[str, list[float]]:
    """All values of each metric."""
    return {
        "ttft": [1e3 * result.ttft for result in results],
        "tpot": [1e3 * result.tpot for result in results if result.tpot is not None],
        "e2el": [1e3 * result.e2el for result in results],
    }


def _is_good(result: Result, goodput: Mapping[str, float]) -> bool:
    times = {"ttft": result.ttft, "tpot": result.tpot or 0.0, "e2el": result.e2el}
    return all(1e3 * times[name] <= limit for name, limit in goodput.items())


def _of_engines(outcome: Outcome, duration: float) -> dict[str, Any]:
    """Sums over the replicas."""
    schedulers = [replica.scheduler for replica in outcome.replicas]
    usages = [replica.usage for replica in outcome.replicas]
    pools = [scheduler.blocks.pool for scheduler in schedulers]
    block_size = schedulers[0].blocks.block_size * len(schedulers[0].blocks.groups)
    busy_s = sum(usage.busy_s for usage in usages)
    block_seconds = sum(usage.block_seconds for usage in usages)
    queried = sum(scheduler.blocks.num_queried_tokens for scheduler in schedulers)
    hits = sum(scheduler.blocks.num_hit_tokens for scheduler in schedulers)
    return {
        "num_steps": sum(scheduler.lives.totals.num_steps for scheduler in schedulers),
        "num_preemptions": sum(scheduler.num_preemptions for scheduler in schedulers),
        "prefix_cache_queries": queried,
        "prefix_cache_hits": hits,
        "prefix_cache_hit_rate": hits / queried if queried else 0.0,
        "busy": busy_s / duration / len(usages),
        "num_blocks": pools[0].num_blocks,
        "kv_usage_mean": block_seconds / busy_s / pools[0].num_blocks,
        "kv_usage_max": max(usage.most_blocks for usage in usages) / pools[0].num_blocks,
        "kv_token_share": sum(usage.token_seconds for usage in usages) / (block_seconds * block_size),
    }
