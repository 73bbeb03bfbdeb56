"""Made-up traces: when requests come and how long they are, drawn from distributions with a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from quire.simulation.trace import TraceRequest
from quire.simulation.workload import Workload


def due_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """When each request is due: gaps of a gamma distribution with mean 1/rate; burstiness 1 is a Poisson process."""
    if rate == float("inf"):
        return [0.0] * count
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def synthetic_trace(workload: Workload, seed: int) -> list[TraceRequest]:
    """The requests of a workload, in order of arrival; the same ones for the same seed."""
    rng = random.Random(seed)
    draw = _drawing(workload, rng)
    times = due_times(workload.num_requests, workload.rate, workload.burstiness, rng)
    return [_request(workload, arrival_s, draw, rng) for arrival_s in times]


def _request(workload: Workload, arrival_s: float, draw: Callable[[int], int], rng: random.Random) -> TraceRequest:
    prefix_id = rng.randrange(workload.num_prefixes) if workload.num_prefixes else None
    prefix_tokens = workload.prefix_len if workload.num_prefixes else 0
    prompt = min(prefix_tokens + draw(workload.prompt_len), workload.max_model_len - 1)
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=min(draw(workload.output_len), workload.max_model_len - prompt),
        prefix_id=prefix_id,
        prefix_tokens=min(prefix_tokens, prompt),
        n=workload.n,
    )


def _drawing(workload: Workload, rng: random.Random) -> Callable[[int], int]:
    """A function that draws a length with a given mean, at least 1."""
    if workload.lengths == "uniform":
        return lambda mean: rng.randint(1, 2 * mean - 1)
    if workload.lengths == "lognormal":
        shift = workload.sigma**2 / 2
        return lambda mean: max(1, round(rng.lognormvariate(math.log(mean) - shift, workload.sigma)))
    return lambda mean: mean
