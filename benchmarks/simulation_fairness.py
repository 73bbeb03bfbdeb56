"""Short requests beside a few of 50,000 tokens: what the long ones cost the short ones, and the other way round.

    python -m benchmarks.simulation_fairness [--requests 2000] [--hardware h100] [--short-step-work 256]

95 % of the requests have 200 prompt tokens, 5 % have 50,000; all have 50 output tokens. Unloaded is the time of a
request that is alone. What the device's steps follow from can be set to see what it does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

from benchmarks.simulated_models import LLAMA_8B, engine_on
from quire.config.engine import QuireConfig
from quire.core import scheduler
from quire.core.order import budget
from quire.simulation.cost_model import CostModel, StepShape
from quire.simulation.routing import RoundRobin
from quire.simulation.run import Result, simulate
from quire.simulation.synthetic import due_times
from quire.simulation.trace import TraceRequest
from quire.utils.math import percentile

ROOT = Path(__file__).parents[1]
SHORT, LONG, OUTPUT, EVERY = 200, 50_000, 50, 20


def trace(num_requests: int, rate: float, *, with_long: bool = True) -> list[TraceRequest]:
    """One in twenty is long; arrivals are a Poisson process."""
    rng = random.Random(0)
    kinds = [LONG if i % EVERY == EVERY // 2 else SHORT for i in range(num_requests)]
    rng.shuffle(kinds)
    due = zip(due_times(num_requests, rate, 1.0, rng), kinds, strict=True)
    return [one(at, prompt) for at, prompt in due if with_long or prompt == SHORT]


def one(arrival_s: float, prompt: int) -> TraceRequest:
    """A request."""
    return TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=OUTPUT)


def run(config: QuireConfig, cost: CostModel, requests: list[TraceRequest]) -> tuple[list[Result], list[Result]]:
    """Results of the short and of the long requests."""
    results = simulate(config, cost, requests, RoundRobin()).results
    pairs = list(zip(requests, results, strict=True))
    kinds = [[result for request, result in pairs if request.prompt_tokens == kind] for kind in (SHORT, LONG)]
    return kinds[0], kinds[1]


def work_s(cost: CostModel, prompt: int) -> float:
    """Seconds that a request takes of the device, roughly: its prompt in one step."""
    return cost.step_s(StepShape(prompt, prompt, prompt * prompt // 2, 1, 1)) - cost.fixed_s


def measure(config: QuireConfig, cost: CostModel, num_requests: int, load: float) -> dict[str, float]:
    """What a load, as a share of the device's time, does to either kind."""
    mean_s = work_s(cost, SHORT) * (1 - 1 / EVERY) + work_s(cost, LONG) / EVERY
    rate = load / mean_s
    (short_alone,), _ = run(config, cost, [one(0.0, SHORT)])
    _, (long_alone,) = run(config, cost, [one(0.0, LONG)])
    without, _ = run(config, cost, trace(num_requests, rate, with_long=False))
    short, long = run(config, cost, trace(num_requests, rate))
    ttft = [result.ttft for result in short]
    slowed = [result.e2el / long_alone.e2el for result in long]
    return {
        "load": load,
        "rate": rate,
        "short_ttft_alone_ms": 1e3 * short_alone.ttft,
        "short_ttft_p99_without_long_ms": 1e3 * percentile([result.ttft for result in without], 99),
        "short_ttft_p99_ms": 1e3 * percentile(ttft, 99),
        "short_ttft_ratio": percentile(ttft, 99) / short_alone.ttft,
        "short_ttft_ratio_to_without_long": percentile(ttft, 99) / percentile([result.ttft for result in without], 99),
        "short_tpot_ratio": statistics.fmean(result.tpot or 0.0 for result in short) / (short_alone.tpot or 1.0),
        "long_alone_s": long_alone.e2el,
        "long_slowed_p50": percentile(slowed, 50),
        "long_slowed_mean": statistics.fmean(slowed),
        "long_slowed_max": max(slowed),
    }


def main() -> None:
    """Print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.3])
    parser.add_argument("--short-step-work", type=float, nargs="+", help="tokens; as the device has it when left out")
    parser.add_argument("--crowded-s", type=float, nargs="+", default=[budget.CROWDED_S])
    parser.add_argument("--output", default=str(ROOT / "benchmarks/results/simulation/fairness.json"))
    args = parser.parse_args()
    config, cost = engine_on(args.hardware, LLAMA_8B, enable_prefix_caching=False)
    limits, rows = config.scheduler_config, []
    works = args.short_step_work or [limits.short_step_work]
    for work, seconds, load in itertools.product(works, args.crowded_s, args.loads):
        scheduler.CROWDED_S = seconds
        paced = replace(config, scheduler_config=replace(limits, short_step_work=work))
        figures = measure(paced, cost, args.requests, load)
        rows.append({"short_step_work": work, "crowded_s": seconds, **figures})
        print({name: round(value, 3) for name, value in rows[-1].items()})
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps({"cost": cost.as_dict(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
