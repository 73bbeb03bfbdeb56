"""How long a prefix must be for loading it to be faster than computing it, measured with this model on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.messages.kv import KVLayout
from quire.messages.request import EngineCoreRequest
from quire.messages.step import NewSequenceData, SchedulerOutputs
from quire.sampling_params import SamplingParams
from quire.worker.cache_engine import CacheEngine
from quire.worker.kv_store import MemoryPages, PageStore
from quire.worker.model_runner import ModelRunner

MOST_TOKENS = 128
"""Of the prompt that is computed to see how long that takes."""
NUM_LOADS = 8


def seconds_of(call: Callable[[], object]) -> float:
    """The shorter of two calls, after one that finds caches cold."""
    times = []
    for _ in range(3):
        began_at = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_at)
    return min(times[1:])


def load_seconds(cache: CacheEngine) -> float:
    """Seconds to verify a page and copy it into the pool. Writes the first block, which nobody uses yet."""
    pages = MemoryPages(NUM_LOADS, cache.layout.block_bytes)
    contents = [(0, bytes([slot]), b"", ()) for slot in range(NUM_LOADS)]
    before, cache.store = cache.store, PageStore([pages])
    cache.swap_out([(0, slot, content) for slot, content in enumerate(contents)])
    loads = [(slot, 0, content) for slot, content in enumerate(contents)]
    elapsed_s = seconds_of(lambda: cache.swap_in(loads))
    cache.store.close()
    cache.store = before
    return elapsed_s / NUM_LOADS


def step_seconds(runner: ModelRunner, layout: KVLayout, num_blocks: int, most_tokens: int) -> tuple[float, float]:
    """Seconds for each token of a prompt, and for a step with one token. Writes blocks that nobody uses yet.

    `most_tokens` may be computed in one step.
    """
    size, num_groups = layout.block_size, len(layout.groups)
    blocks_each = min(num_blocks // num_groups, -(-min(MOST_TOKENS, most_tokens) // size))
    count = min(MOST_TOKENS, most_tokens, blocks_each * size)
    request = EngineCoreRequest(
        request_id="break-even",
        prompt_token_ids=[0] * count,
        sampling_params=SamplingParams(temperature=0),
        seed=0,
        max_tokens=1,
    )
    tables = [(0, list(range(group * blocks_each, (group + 1) * blocks_each))) for group in range(num_groups)]
    for group in layout.state_groups:
        tables[group] = 0, [0, 1]  # read and written: what they hold is of no interest
    runner.execute(
        _step(count, new_requests=[request], new_sequences=[NewSequenceData(0, "break-even", 0, [], tables)])
    )
    prompt_s = seconds_of(lambda: runner.execute(_step(count)))
    token_s = seconds_of(lambda: runner.execute(_step(1)))
    runner.execute(SchedulerOutputs(removed_seq_ids=[0], removed_request_ids=["break-even"]))
    return prompt_s / count, token_s


def _step(num_tokens: int, **news: list[object]) -> SchedulerOutputs:
    """Compute the first tokens of the only sequence, and draw none."""
    return SchedulerOutputs(
        seq_ids=[0],
        num_computed_tokens=[0],
        num_scheduled_tokens=[num_tokens],
        num_draws=[0],
        num_batched_tokens=num_tokens,
        **news,  # type: ignore[arg-type]
    )
