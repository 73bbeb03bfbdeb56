"""Ops over caches of rows, native and in torch on one thread, in turn: medians in microseconds.

    python -m benchmarks.rows [--rounds 15] [--threads 2] [--only select_blocks]

Sizes are those of a layer of MiniMax M3 (`select_blocks`) and of DeepSeek V4 Flash (the others), in bfloat16; pages lie
in any order.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from quire.ops.backends import ops_of
from quire.ops.contracts.operands import AttentionMetadata, CompressorWeights, RowCache
from quire.ops.contracts.ops import Ops

PAGE = 128


class Case(NamedTuple):
    """One op at one size."""

    op: str
    what: str
    run: Callable[[Ops], object]


def step(contexts: list[int], new: int) -> AttentionMetadata:
    """Of `new` tokens of each of some sequences, the last ones of their contexts."""
    width = max(-(-context // PAGE) for context in contexts)
    order = torch.randperm(width * len(contexts), generator=torch.Generator().manual_seed(0))
    return AttentionMetadata(
        query_start=(torch.arange(len(contexts) + 1) * new).int(),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=order.int().view(len(contexts), width),
        block_size=PAGE,
    )


def rows_of(metadata: AttentionMetadata, size: int, rate: int = 1) -> RowCache:
    """Random ones."""
    shape = (2, metadata.block_tables.numel(), 1, PAGE // rate, size // 2)
    return RowCache(rows=torch.randn(shape).bfloat16(), size=size, metadata=metadata)


def select_blocks(contexts: list[int], new: int) -> Case:
    """Four heads of 128; 16 blocks of 128 tokens are chosen, two of them the last ones."""
    keys = rows_of(step(contexts, new), 128)
    query = torch.randn(len(contexts) * new, 4, 128).bfloat16()
    return Case(
        "select_blocks",
        f"{len(contexts)} x {contexts[0]}, {new} new",
        lambda ops: ops.select_blocks(query, keys, block_size=128, num_selected=16, num_local=2),
    )


def compress(rate: int, context: int, new: int) -> Case:
    """Entries of 512 features; where they overlap, of another 128 for the indexer."""
    metadata, overlaps = step([context], new), rate == 4
    sizes = (512, 128) if overlaps else (512,)
    features = (1 + overlaps) * sum(sizes)
    weights = CompressorWeights(
        rate=rate,
        reach=rate * (1 + overlaps),
        bias=torch.randn(rate, features),
        norms=tuple(torch.rand(size) for size in sizes),
        eps=1e-6,
    )
    tail, entries = rows_of(metadata, 2 * features), rows_of(metadata, sum(sizes), rate)
    cos_sin = torch.randn(context, 64)
    return Case(
        "compress",
        f"entries of {rate}, context {context}, {new} new",
        lambda ops: ops.compress(tail, entries, weights, cos_sin),
    )


def select_entries(context: int, new: int) -> Case:
    """512 of them, by 64 heads of 128."""
    entries = rows_of(step([context], new), 640, 4)
    query, weights = torch.randn(new, 64, 128).bfloat16(), torch.randn(new, 64)
    return Case(
        "select_entries",
        f"context {context}, {new} new",
        lambda ops: ops.select_entries(query, weights, entries, rate=4, num_selected=512),
    )


def attention(rate: int, context: int, new: int) -> Case:
    """64 heads of 512, a window of 128; of entries of 4 tokens 512 are chosen."""
    metadata = step([context], new)
    last, entries = rows_of(metadata, 512), rows_of(metadata, 640 if rate == 4 else 512, rate)
    query, sinks = torch.randn(new, 64, 512).bfloat16(), torch.randn(64)
    chosen = torch.stack([torch.randperm((context - new) // 4)[:512].sort().values for _ in range(new)]).int()
    selected = chosen if rate == 4 else None
    return Case(
        "compressed_attention",
        f"entries of {rate}, context {context}, {new} new",
        lambda ops: ops.compressed_attention(query, sinks, last, entries, selected, scale=0.04, window=128, rate=rate),
    )


def cases() -> Iterator[Case]:
    """All of them, each made when it is its turn."""
    for contexts, new in (([4096], 1), ([16384], 1), ([65536], 1), ([4096] * 8, 1), ([4096], 16), ([8192], 512)):
        yield select_blocks(contexts, new)
    for rate, new in ((4, 1), (4, 16), (4, 1024), (128, 1), (128, 1024)):
        yield compress(rate, 4096, new)
    for new in (1, 16):
        yield select_entries(4096, new)
        yield attention(4, 4096, new)
        yield attention(128, 4096, new)


def medians(runs: list[Callable[[], object]], rounds: int) -> list[float]:
    """Of each, in microseconds. They take turns, and the second call of each turn counts: the first wakes threads."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for run, own in zip(runs, times, strict=True):
            run()
            start = time.perf_counter()
            run()
            own.append((time.perf_counter() - start) * 1e6)
    return [statistics.median(own) for own in times]


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="an op")
    args = parser.parse_args()
    torch.manual_seed(0)
    reference, native = ops_of("reference"), ops_of("cpu", num_threads=args.threads)
    native.use_this_thread()
    with torch.inference_mode():
        for case in cases():
            if args.only not in (None, case.op):
                continue
            slow, fast = medians([lambda: case.run(reference), lambda: case.run(native)], args.rounds)  # noqa: B023
            print(f"{case.op:<21} {case.what:<37} {slow:>9,.0f} -> {fast:>7,.0f} us, {slow / fast:.1f} x", flush=True)


if __name__ == "__main__":
    main()
