"""What the control plane costs a step: scheduler, block manager and update over an executor that does nothing.

python benchmarks/control_plane.py [--num-seqs 256] [--steps 300] [--cached-blocks 0 100000] [--hash-tokens 131072]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

from quire.core.kv.block_manager import BlockManager
from quire.core.order.budget import StepCost
from quire.core.order.policy import FirstComeFirstServed
from quire.core.order.queue import Tenant
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence, SequenceGroup
from quire.messages.kv import FullAttentionSpec, PageSpec
from quire.messages.request import EngineCoreRequest
from quire.messages.step import ModelRunnerOutput, SchedulerOutputs
from quire.sampling_params import SamplingParams
from quire.utils.hashing import block_hashes
from quire.utils.math import cdiv

BLOCK_SIZE = 32
VOCAB_SIZE = 150_000
PREFILL_TOKENS = 2048
"""Prompt tokens of a step, beside one token of each sequence."""
MANY = 10**6


def run(num_seqs: int, num_steps: int, prompt_len: int, num_cached_blocks: int) -> list[float]:
    """Milliseconds of schedule + update for each step in which all sequences decode; nobody is preempted.

    So many blocks more are in the prefix index than the sequences use.
    """
    scheduler = scheduler_of(num_seqs, num_steps, prompt_len, num_cached_blocks)
    rng = random.Random(0)
    for i in range(num_seqs):
        scheduler.add(request(str(i), [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)]))
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
    assert scheduler.num_preemptions == 0
    assert scheduler.blocks.pool.num_cached >= num_cached_blocks
    return times


def scheduler_of(num_seqs: int, num_steps: int, prompt_len: int, num_cached_blocks: int) -> Scheduler:
    """One whose pool has a block for each token until the last step, and some that are cached."""
    num_prefill_steps = cdiv(num_seqs * prompt_len, PREFILL_TOKENS) + 1
    most_tokens = prompt_len + num_prefill_steps + num_steps + 1
    blocks = block_manager(num_seqs * cdiv(most_tokens, BLOCK_SIZE) + num_cached_blocks)
    fill_cache(blocks, num_cached_blocks)
    return Scheduler(
        blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=PREFILL_TOKENS + num_seqs,
        max_model_len=MANY,
        max_chunk_tokens=PREFILL_TOKENS,
        clock=time.monotonic,
        policy=FirstComeFirstServed(),
        cost=StepCost(context_per_token=1000.0),
    )


def block_manager(num_blocks: int) -> BlockManager:
    page = PageSpec(num_kv_heads=1, head_size=64, dtype="bfloat16", block_size=BLOCK_SIZE)
    spec = FullAttentionSpec(page=page)
    return BlockManager(num_blocks, [spec], max_chunk_tokens=PREFILL_TOKENS, enable_prefix_caching=True)


def fill_cache(blocks: BlockManager, count: int) -> None:
    """Let so many blocks be found by their content, and nobody use them."""
    parent, taken = b"cached", [blocks.pool.allocate() for _ in range(count)]
    for block_id in taken:
        token_ids = range(block_id, block_id + BLOCK_SIZE)
        (content_hash,) = block_hashes(parent, token_ids, BLOCK_SIZE)
        blocks.pool.remember(block_id, 0, content_hash, parent, tuple(token_ids))
        blocks.pool.release(block_id)
        parent = content_hash


def request(request_id: str, prompt: list[int]) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=MANY, ignore_eos=True)
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, seed=0, max_tokens=MANY
    )


def group_of(prompt: list[int]) -> SequenceGroup:
    return SequenceGroup(request("", prompt), Tenant(""), (0.0, 0))


def null_result(plan: SchedulerOutputs, tokens: itertools.count[int]) -> ModelRunnerOutput:
    """One made-up token for each sequence that samples."""
    return ModelRunnerOutput(token_ids=[[next(tokens) % VOCAB_SIZE] if count else [] for count in plan.num_draws])


def time_prefix(num_tokens: int) -> tuple[float, float]:
    """Milliseconds to hash a prompt, and to find all of it in the prefix cache."""
    rng = random.Random(0)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
    start = time.perf_counter()
    block_hashes(b"parent", prompt, BLOCK_SIZE)
    hashing_ms = 1000 * (time.perf_counter() - start)
    blocks = block_manager(cdiv(num_tokens, BLOCK_SIZE))
    first, again = (Sequence(i, group_of(prompt), 0, prompt) for i in range(2))
    blocks.allocate_prefix(first, blocks.match_prefix(first))
    blocks.append(first, num_tokens)
    first.num_computed_tokens = first.num_committed_tokens = num_tokens
    blocks.retire(first)
    start = time.perf_counter()
    matched = blocks.match_prefix(again)
    finding_ms = 1000 * (time.perf_counter() - start)
    assert len(matched[0]) == (num_tokens - 1) // BLOCK_SIZE
    return hashing_ms, finding_ms


def main() -> None:
    """Print a line for each number of cached blocks, and one for a long prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--cached-blocks", type=int, nargs="+", default=[0])
    parser.add_argument("--hash-tokens", type=int, default=131_072)
    args = parser.parse_args()
    for num_cached_blocks in args.cached_blocks:
        times = run(args.num_seqs, args.steps, args.prompt_len, num_cached_blocks)
        print(
            f"{args.num_seqs} sequences, {num_cached_blocks} cached blocks: schedule + update median "
            f"{statistics.median(times):.3f} ms, p90 {statistics.quantiles(times, n=10)[-1]:.3f} ms a step"
        )
    hashing_ms, finding_ms = min(time_prefix(args.hash_tokens) for _ in range(5))
    print(f"prompt of {args.hash_tokens} tokens: hashed in {hashing_ms:.1f} ms, found in {finding_ms:.1f} ms")


if __name__ == "__main__":
    main()
