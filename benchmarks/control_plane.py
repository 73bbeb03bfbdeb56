"""What the control plane costs a step: scheduler, block manager and update over an executor that does nothing.

python benchmarks/control_plane.py [--num-seqs 256] [--steps 300]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

from quire.core.block_manager import BlockManager
from quire.core.budget import StepCost
from quire.core.policy import FirstComeFirstServed
from quire.core.scheduler import Scheduler
from quire.messages.kv import FullAttentionSpec, PageSpec
from quire.messages.request import EngineCoreRequest
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.sampling_params import SamplingParams


def run(num_seqs: int, num_steps: int, prompt_len: int) -> list[float]:
    """Milliseconds of schedule + update for each step in which all sequences decode."""
    block_size = 32
    page = PageSpec(num_kv_heads=1, head_size=64, dtype="bfloat16", block_size=block_size)
    blocks = num_seqs * -(-(prompt_len + num_steps + 2) // block_size)
    scheduler = Scheduler(
        BlockManager(blocks, [FullAttentionSpec(page=page)], max_chunk_tokens=2048, enable_prefix_caching=True),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs),
        max_model_len=10**6,
        max_chunk_tokens=2048,
        clock=time.monotonic,
        policy=FirstComeFirstServed(),
        cost=StepCost(context_per_token=1000.0),
    )
    params = SamplingParams(max_tokens=num_steps + 100, ignore_eos=True)
    rng = random.Random(0)
    for i in range(num_seqs):
        prompt = [rng.randrange(150_000) for _ in range(prompt_len)]
        scheduler.add(
            EngineCoreRequest(
                request_id=str(i), prompt_token_ids=prompt, sampling_params=params, seed=0, max_tokens=num_steps + 100
            )
        )
    tokens = itertools.count()
    times: list[float] = []
    while len(times) < num_steps:
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        result = null_result(plan, tokens)
        again = time.perf_counter()
        scheduler.update(plan, result)
        if len(plan.seq_ids) == plan.num_batched_tokens == num_seqs:
            times.append(1000 * (time.perf_counter() - again + middle - start))
    return times


def null_result(plan: SchedulerOutputs, tokens: itertools.count[int]) -> ModelRunnerOutput:
    """One made-up token for each sequence that samples."""
    return ModelRunnerOutput(token_ids=[[next(tokens) % 150_000] if count else [] for count in plan.num_draws])


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt-len", type=int, default=128)
    args = parser.parse_args()
    times = run(args.num_seqs, args.steps, args.prompt_len)
    print(
        f"{args.num_seqs} sequences: schedule + update median {statistics.median(times):.3f} ms, "
        f"p90 {statistics.quantiles(times, n=10)[-1]:.3f} ms a step"
    )


if __name__ == "__main__":
    main()
