"""Native CPU ops against torch and against the machine's read bandwidth, measured in the same run.

    python benchmarks/ops.py [--rounds 5] [--dtype bfloat16] [--out 4096 --in 4096] [--megabytes 800]

Every round measures each case once, in turn, so that a busy machine disturbs all alike; the table holds medians. A
linear layer cycles through `--megabytes` of weights, more than the caches hold.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from quire.attention.context import AttentionMetadata
from quire.ops import table
from quire.ops.cpu import library, memory
from quire.ops.functional import RopeAndCacheSpec

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 1024)


@dataclass
class Case:
    """One line of the table."""

    name: str
    run: Callable[[int], object]
    """Takes the number of the call, to cycle through weights."""
    calls: int
    num_bytes: int = 0
    flops: int = 0
    baseline: Callable[[int], object] | None = None
    times: list[float] = field(default_factory=list)
    baseline_times: list[float] = field(default_factory=list)

    def measure(self) -> None:
        self.times.append(seconds(self.run, self.calls))
        if self.baseline is not None:
            self.baseline_times.append(seconds(self.baseline, self.calls))

    def line(self, bandwidth: float) -> str:
        time_s = statistics.median(self.times)
        rate = self.num_bytes / time_s / 1e9
        cells = [f"{self.name:<28}", f"{time_s * 1e6:>10.1f}"]
        cells += [f"{rate:>8.1f}", f"{rate / bandwidth:>8.2f}"] if self.num_bytes else [" " * 8, " " * 8]
        cells += [f"{self.flops / time_s / 1e12:>8.2f}" if self.flops else " " * 8]
        if self.baseline_times:
            baseline_s = statistics.median(self.baseline_times)
            cells += [f"{baseline_s * 1e6:>10.1f}", f"{baseline_s / time_s:>7.2f}x"]
        return " ".join(cells)


def seconds(run: Callable[[int], object], calls: int) -> float:
    start = time.perf_counter()
    for call in range(calls):
        run(call)
    return (time.perf_counter() - start) / calls


def read_bandwidth(megabytes: int) -> Case:
    data, total = memory.zeros(megabytes << 20), ctypes.c_uint64()
    data.fill_(1)
    lib = library.load()
    return Case(
        name="read",
        run=lambda _: lib.qr_read_bandwidth(data.data_ptr(), data.numel(), ctypes.byref(total)),
        calls=1,
        num_bytes=data.numel(),
    )


def linear_cases(ops: dict[str, table.Op], args: argparse.Namespace) -> list[Case]:
    dtype: torch.dtype = getattr(torch, args.dtype)
    num_bytes = args.out * args.inner * dtype.itemsize
    copies = max(2, (args.megabytes << 20) // num_bytes)
    dense = [torch.randn(args.out, args.inner).to(dtype) for _ in range(min(copies, 12))]
    packed = [ops["pack_linear"]([dense[index % len(dense)]], dtype=dtype) for index in range(copies)]
    cases = []
    for rows in ROWS:
        x = torch.randn(rows, args.inner).to(dtype)
        cases.append(
            Case(
                name=f"linear {args.dtype} M={rows}",
                run=lambda call, x=x: ops["linear"](x, packed[call % copies]),  # type: ignore[misc]
                baseline=lambda call, x=x: F.linear(x, dense[call % len(dense)]),  # type: ignore[misc]
                calls=8 if rows <= 64 else 2,
                num_bytes=num_bytes,
                flops=2 * rows * args.out * args.inner,
            )
        )
    return cases


def attention_case(
    ops: dict[str, table.Op], dtype: torch.dtype, sequences: int, context: int, queries: int = 1
) -> Case:
    """Qwen3-0.6B's heads: 16 over 8 of 128 elements."""
    heads, kv_heads, head_size, block_size, layers = 16, 8, 128, 32, 4
    blocks = -(-context // block_size)
    caches = [
        ops["allocate_kv_cache"](
            num_blocks=sequences * blocks,
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_size=head_size,
            dtype=dtype,
        )
        for _ in range(layers)
    ]
    spec = RopeAndCacheSpec(num_heads=heads, num_kv_heads=kv_heads, head_size=head_size, rotary_dim=0)
    slots = torch.arange(sequences * blocks * block_size)
    qkv = torch.randn(slots.numel(), (heads + 2 * kv_heads) * head_size).to(dtype)
    for cache in caches:
        ops["rope_and_cache"](qkv, slots, None, None, None, cache, slots, spec)
    query = torch.randn(sequences * queries, heads, head_size).to(dtype)
    metadata = AttentionMetadata(
        query_start=torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32),
        seq_lens=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
        block_size=block_size,
    )
    return Case(
        name=f"attention {sequences} x {context}" + (f" q{queries}" if queries > 1 else ""),
        run=lambda call: ops["paged_attention"](query, caches[call % layers], metadata, scale=head_size**-0.5),
        calls=8,
        num_bytes=sequences * context * kv_heads * head_size * 2 * dtype.itemsize,
        flops=2 * 2 * sequences * queries * heads * head_size * (context - (queries - 1) // 2),
    )


def small_cases(ops: dict[str, table.Op], dtype: torch.dtype) -> list[Case]:
    cases = []
    weight, reference = torch.ones(1024), table.implementation_of("reference")
    for rows in (1, 32):
        x = torch.randn(rows, 1024).to(dtype)
        cases.append(
            Case(
                name=f"rms_norm M={rows}",
                run=lambda _, x=x: ops["rms_norm"](x, weight, 1e-6, residual=x),  # type: ignore[misc]
                baseline=lambda _, x=x: F.rms_norm(x, (1024,)) + x,  # type: ignore[misc]
                calls=50,
            )
        )
        logits = torch.randn(rows, 151_936) * 4
        cases.append(
            Case(
                name=f"argmax R={rows}",
                run=lambda _, logits=logits: ops["argmax"](logits),  # type: ignore[misc]
                baseline=lambda _, logits=logits: torch.argmax(logits, dim=-1),  # type: ignore[misc]
                calls=4,
            )
        )
        sampling = (torch.ones(rows), torch.full((rows,), 50), torch.full((rows,), 0.9), torch.zeros(rows))
        uniforms = torch.rand(rows, 1, dtype=torch.float64)
        cases.append(
            Case(
                name=f"sample top-k top-p R={rows}",
                run=lambda _, logits=logits, s=sampling, u=uniforms: ops["sample"](logits, *s, u),  # type: ignore[misc]
                baseline=lambda _, logits=logits, s=sampling, u=uniforms: reference["sample"](logits, *s, u),  # type: ignore[misc]
                calls=2,
            )
        )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--out", type=int, default=4096)
    parser.add_argument("--in", dest="inner", type=int, default=4096)
    parser.add_argument("--megabytes", type=int, default=800)
    args = parser.parse_args()
    ops, dtype = table.implementation_of("cpu"), getattr(torch, args.dtype)
    read = read_bandwidth(args.megabytes)
    cases = [read, *linear_cases(ops, args)]
    cases += [attention_case(ops, dtype, *size) for size in ((1, 128), (1, 8192), (8, 512), (32, 192))]
    cases += [attention_case(ops, dtype, 1, 1024, 1024)]
    cases += small_cases(ops, dtype)
    for _ in range(args.rounds):
        for case in cases:
            case.measure()
    bandwidth = read.num_bytes / statistics.median(read.times) / 1e9
    print(
        f"{library.isa()}, {library.num_threads()} threads, torch {torch.__version__} {torch.get_num_threads()} threads"
    )
    print(f"{'case':<28} {'us':>10} {'GB/s':>8} {'of read':>8} {'TFLOP/s':>8} {'torch us':>10} {'ratio':>8}")
    for case in cases:
        print(case.line(bandwidth))


if __name__ == "__main__":
    main()
