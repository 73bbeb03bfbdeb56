"""Linear layers on every instruction set that this machine has: none may be slower than a lower one that it contains.

    python -m benchmarks.instruction_sets [--formats bfloat16 float16 int8 int4_g128] [--rows 1 8 128] [--rounds 5]

Every round measures each format and number of rows on all sets in turn; the table holds medians. The exit status is 1
if a set takes more than `--tolerance` times as long as a lower one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import cast

import torch

from benchmarks.ops import copy_of, seconds
from quire.ops.backends import implementation_of
from quire.ops.contracts.operands import LinearWeight
from quire.ops.cpu import library

DENSE = ("bfloat16", "float32", "float16")


def instruction_sets() -> list[int]:
    """From the lowest to the best of this machine, as `qr_init` numbers them."""
    return [library.ISA_NAMES.index(name) for name in library.isas()]


def use(instruction_set: int) -> None:
    library.check(library.load().qr_init(instruction_set, library.num_threads()))


def packed_weights(format: str, out_features: int, in_features: int, megabytes: int) -> list[LinearWeight]:
    """Copies of one weight, more than the caches hold, as the set in use packs it."""
    ops, dense = implementation_of("cpu"), torch.randn(out_features, in_features).bfloat16()
    if format in DENSE:
        first = cast(LinearWeight, ops["pack_linear"]([dense], dtype=getattr(torch, format)))
    else:
        first = cast(LinearWeight, ops["quantize_linear"]([dense], format=format))
    num_bytes = first.num_bytes
    return [first, *(copy_of(first) for _ in range(max(1, (megabytes << 20) // num_bytes - 1)))]


def product(format: str, rows: int, weights: list[LinearWeight]) -> Callable[[int], object]:
    linear = implementation_of("cpu")["linear"]
    x = torch.randn(rows, weights[0].in_features).to(getattr(torch, format) if format in DENSE else torch.bfloat16)
    return lambda call: linear(x, weights[call % len(weights)])


def measure(args: argparse.Namespace, format: str) -> dict[int, list[float]]:
    """Median seconds of a product by number of rows, of each set."""
    runs: dict[int, list[tuple[int, Callable[[int], object], int]]] = {rows: [] for rows in args.rows}
    for instruction_set in instruction_sets():
        use(instruction_set)
        weights = packed_weights(format, args.out, args.inner, args.megabytes)
        for rows in args.rows:
            calls = len(weights) if rows <= 32 else 2
            runs[rows].append((instruction_set, product(format, rows, weights), calls))
    times: dict[int, list[list[float]]] = {rows: [[] for _ in each] for rows, each in runs.items()}
    for _ in range(args.rounds):
        for rows, each in runs.items():
            for (instruction_set, run, calls), own_times in zip(each, times[rows], strict=True):
                use(instruction_set)
                own_times.append(seconds(run, calls))
    return {rows: [statistics.median(own) for own in each] for rows, each in times.items()}


def contains(higher: str, lower: str) -> bool:
    """AVX-512 alone has no VNNI, and no processor that has AVX-VNNI would run its kernels."""
    return (higher, lower) != ("avx512", "avx_vnni")


def slowdown(names: list[str], times: list[float]) -> float:
    """The most that a set takes of the time of a lower one that it contains."""
    pairs = ((i, j) for i in range(len(times)) for j in range(i) if contains(names[i], names[j]))
    return max((times[i] / times[j] for i, j in pairs), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["bfloat16", "float16", "int8", "int4_g128"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 8, 16, 32, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=int, default=4096)
    parser.add_argument("--in", dest="inner", type=int, default=1024)
    parser.add_argument("--megabytes", type=int, default=200, help="of weights, for each set")
    parser.add_argument("--tolerance", type=float, default=1.1)
    args = parser.parse_args()
    names = [library.ISA_NAMES[i] for i in instruction_sets()]
    print(f"{'microseconds':<20} " + " ".join(f"{name:>12}" for name in names) + f" {'slowdown':>9}")
    worst = 0.0
    for format in args.formats:
        for rows, times in measure(args, format).items():
            slowest = slowdown(names, times)
            worst = max(worst, slowest)
            cells = " ".join(f"{time_s * 1e6:>12.1f}" for time_s in times)
            print(f"{f'{format} M={rows}':<20} {cells} {slowest:>8.2f}x")
    if worst > args.tolerance:
        sys.exit(f"A set takes {worst:.2f} times as long as a lower one; the limit is {args.tolerance}.")


if __name__ == "__main__":
    main()
