"""How fast a simulation of many replicas is.

    python -m benchmarks.simulation_scale [--replicas 1000] [--requests 1000000] [--routing least-loaded]

Llama 3.1 8B on H100s, prompts of 128 and outputs of 128 tokens on average, lognormal.
"""

from __future__ import annotations

import argparse
import resource
import time

from benchmarks.simulated_models import LLAMA_8B, engine_on
from quire.observability.progress import generate_progress
from quire.simulation.routing import ROUTERS
from quire.simulation.run import simulate
from quire.simulation.synthetic import synthetic_trace
from quire.simulation.workload import Workload


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second of each replica")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--routing", choices=tuple(ROUTERS), default="least-loaded")
    parser.add_argument("--blocks", type=int, default=2048)
    args = parser.parse_args()
    config, cost = engine_on(
        "h100", LLAMA_8B, enable_prefix_caching=False, num_gpu_blocks_override=args.blocks, max_model_len=4096
    )
    workload = Workload(
        num_requests=args.requests,
        rate=args.rate * args.replicas,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        lengths="lognormal",
        max_model_len=4096,
    )
    began_at = time.process_time()
    trace = synthetic_trace(workload, seed=0)
    made_at = time.process_time()
    with generate_progress(True, len(trace)) as show:
        outcome = simulate(config, cost, trace, ROUTERS[args.routing](), num_replicas=args.replicas, on_progress=show)
    seconds = time.process_time() - made_at
    steps = sum(replica.scheduler.lives.totals.num_steps for replica in outcome.replicas)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{args.replicas} replicas, {args.requests:,} requests, {steps:,} steps: {seconds:.1f} s of one core, and "
        f"{made_at - began_at:.1f} s for the trace; {1e6 * seconds / args.requests:.0f} us a request; {peak:.1f} GiB; "
        f"10^6 requests in {seconds / args.requests * 1e6 / 60:.1f} min"
    )


if __name__ == "__main__":
    main()
