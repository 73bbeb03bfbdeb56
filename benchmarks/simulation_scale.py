"""How fast a simulation of many replicas is.

    python -m benchmarks.simulation_scale [--replicas 1000] [--requests 1000000] [--processes 1]

Llama 3.1 8B on H100s, prompts of 128 and outputs of 128 tokens on average, lognormal; Poisson arrivals. Several
processes have some replicas at a time, and what round-robin routing sends to them: the same simulation, in parts.
"""

from __future__ import annotations

import argparse
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from multiprocessing import get_context

from benchmarks.simulated_models import LLAMA_8B, engine_on
from quire.simulation.routing import ROUTERS
from quire.simulation.run import simulate
from quire.simulation.synthetic import synthetic_trace
from quire.simulation.trace import TraceRequest
from quire.simulation.workload import Workload

CONTEXT = 4096
PART = 20
"""Replicas that one process simulates at a time: their state stays in its caches."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one process simulates: replicas [first, last) of all."""

    args: argparse.Namespace
    first: int
    last: int


@cache
def whole_trace(workload: Workload) -> list[TraceRequest]:
    """The requests of all replicas; made once in each process."""
    return synthetic_trace(workload, seed=0)


def simulate_part(part: Part) -> tuple[float, float, int, float]:
    """(seconds of one core for the trace, and for the simulation; steps; GiB at most)."""
    args = part.args
    config, cost = engine_on(
        "h100", LLAMA_8B, enable_prefix_caching=False, num_gpu_blocks_override=args.blocks, max_model_len=CONTEXT
    )
    workload = Workload(
        num_requests=args.requests,
        rate=args.rate * args.replicas,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        lengths="lognormal",
        max_model_len=CONTEXT,
    )
    began_at = time.process_time()
    trace = whole_trace(workload)
    mine = [one for number, one in enumerate(trace) if part.first <= number % args.replicas < part.last]
    made_at = time.process_time()
    outcome = simulate(config, cost, mine, ROUTERS[args.routing](), num_replicas=part.last - part.first)
    seconds = time.process_time() - made_at
    steps = sum(replica.scheduler.lives.totals.num_steps for replica in outcome.replicas)
    return made_at - began_at, seconds, steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second of each replica")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--routing", choices=tuple(ROUTERS), default="round-robin")
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.processes > 1 and args.routing != "round-robin":
        parser.error("several processes need --routing round-robin: no other one can be taken apart")
    is_whole = args.routing != "round-robin"
    num_parts = 1 if is_whole else max(args.processes, args.replicas // PART)
    borders = [args.replicas * index // num_parts for index in range(num_parts + 1)]
    parts = [Part(args, first, last) for first, last in pairwise(borders)]
    began_at = time.perf_counter()
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        found = list(pool.map(simulate_part, parts))
    wall_s = time.perf_counter() - began_at
    trace_s, seconds, steps = (sum(part[column] for part in found) for column in range(3))
    peak = args.processes * max(part[3] for part in found)
    print(
        f"{args.replicas} replicas, {args.requests:,} requests, {steps:,} steps: {seconds:.1f} s of one core and "
        f"{trace_s:.1f} s for the trace; {wall_s:.1f} s with {args.processes} processes; "
        f"{1e6 * seconds / args.requests:.0f} us a request; {peak:.1f} GiB"
    )


if __name__ == "__main__":
    main()
