"""The mixture of experts against its own experts multiplied one by one, and against the machine's read bandwidth.

    python -m benchmarks.experts [--formats bfloat16 int8 int4_g128] [--rows 1 16 512] [--gate plain] [--rounds 5]

Layers have the sizes of Qwen3-30B-A3B with fewer experts: `--experts` of them, `--chosen` for a token. A call is one
layer; calls cycle through `--layers`. Bytes are those of the experts that the rows touch, and of the router. The column
`one by one` holds the same mixture expert by expert: routing by torch, and the library's products.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from functools import partial
from typing import cast

import torch

from benchmarks.ops import Case, read_bandwidth
from quire.config.layers.experts import ClampedGate, Routing
from quire.ops.backends import Op, implementation_of
from quire.ops.contracts.operands import ExpertWeights, LinearWeight, MixtureWeights
from quire.ops.cpu import library
from quire.ops.cpu.products.gemm import gated_linear, linear
from quire.ops.cpu.runtime import memory
from quire.ops.reference.experts import parts_of, route
from quire.ops.threads import one_thread

HIDDEN, SIZE = 2048, 768
GATES: dict[str, str | ClampedGate] = {
    "plain": "silu",
    "clamped": ClampedGate(limit=7.0, slope=1.702, offset=1.0),
    "none": "relu2",
}
"""What stands between an expert's products: that of Qwen, of gpt-oss, and of Nemotron-H."""


def layers(ops: dict[str, Op], args: argparse.Namespace, weights: str) -> list[MixtureWeights]:
    """Routers of their own; experts are copies of one, which lie where a model's lie."""
    pack = ops["pack_linear"] if weights in ("bfloat16", "float32", "float16") else ops["quantize_linear"]
    kind = {"dtype": getattr(torch, weights)} if pack is ops["pack_linear"] else {"format": weights}
    inner = SIZE if args.gate == "none" else 2 * SIZE
    gate_up, down = (
        cast(LinearWeight, pack([torch.randn(*shape) / 40], **kind)) for shape in ((inner, HIDDEN), (HIDDEN, SIZE))
    )
    made = []
    for _ in range(args.layers):
        with memory.weights_together():
            copies = [ExpertWeights(gate_up=copy_of(gate_up), down=copy_of(down)) for _ in range(args.experts)]
        router = cast(LinearWeight, ops["pack_linear"]([torch.randn(args.experts, HIDDEN)], dtype=torch.float32))
        made.append(MixtureWeights(router=router, experts=tuple(copies)))
    return made


def copy_of(weight: LinearWeight) -> LinearWeight:
    """In memory of its own, where packing would have put it."""
    tensors = {
        name: memory.weight_zeros(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for name, tensor in weight.tensors.items()
    }
    return dataclasses.replace(weight, tensors=tensors)


def touched_bytes(x: torch.Tensor, weights: MixtureWeights, routing: Routing) -> int:
    """Of weights."""
    chosen, _ = route(linear(x.float(), weights.router), routing, None)
    experts = [weights.experts[index] for index in chosen.unique().tolist()]
    read = [weights.router, *(part for expert in experts for part in (expert.gate_up, expert.down))]
    return sum(tensor.nbytes for weight in read for tensor in weight.tensors.values())


def inner_of(x: torch.Tensor, expert: ExpertWeights, gate: str | ClampedGate) -> torch.Tensor:
    if isinstance(gate, str):
        return (gated_linear if expert.is_gated else linear)(x, expert.gate_up, activation=gate)
    opened, up = linear(x, expert.gate_up, out_dtype=torch.float32).chunk(2, dim=-1)
    opened, up = opened.clamp_(max=gate.limit), up.clamp_(-gate.limit, gate.limit)
    return (opened * (opened * gate.slope).sigmoid_() * (up + gate.offset)).to(x.dtype)


def one_by_one(x: torch.Tensor, weights: MixtureWeights, routing: Routing, gate: str | ClampedGate) -> torch.Tensor:
    with one_thread(), torch.inference_mode():
        total = x.float()
        for part in parts_of(linear(x.float(), weights.router), weights, routing):
            inner = inner_of(x[part.rows], part.expert, gate)
            out = linear(inner, part.expert.down, out_dtype=torch.float32)
            total.index_add_(0, part.rows, out.mul_(part.weights.unsqueeze(1)))
        return total.to(x.dtype)


def cases(ops: dict[str, Op], args: argparse.Namespace, weights: str) -> list[Case]:
    made = layers(ops, args, weights)
    routing = Routing(num_chosen=args.chosen, renormalized=True)
    whole = partial(ops["mixture_of_experts"], routing=routing, activation=GATES[args.gate])
    found = []
    for rows in args.rows:
        x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
        found.append(
            Case(
                name=f"experts {weights} T={rows}",
                run=lambda call, x=x: whole(x, made[call % len(made)], residual=x),  # type: ignore[misc]
                baseline=lambda call, x=x: one_by_one(x, made[call % len(made)], routing, GATES[args.gate]),  # type: ignore[misc]
                calls=4 * len(made) if rows <= 32 else 1,
                num_bytes=statistics.mean(touched_bytes(x, layer, routing) for layer in made),
                flops=(4 if args.gate == "none" else 6) * rows * args.chosen * HIDDEN * SIZE,
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=["bfloat16", "int8", "int4_g128"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16, 512])
    parser.add_argument("--gate", choices=GATES, default="plain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--chosen", type=int, default=8)
    args = parser.parse_args()
    ops = implementation_of("cpu")
    read = read_bandwidth(512)
    print(f"{library.isa()}, {library.num_threads()} threads")
    print(f"{'case':<34} {'us':>10} {'GB/s':>8} {'of read':>8} {'TFLOP/s':>8} {'one by one':>10} {'ratio':>8}")
    for weights in args.formats:
        for case in cases(ops, args, weights):
            read.times.clear()
            for _ in range(args.rounds):
                read.measure()
                case.measure()
            bandwidth = read.num_bytes / statistics.median(read.times) / 1e9
            print(f"{case.line(bandwidth)}   read {bandwidth:.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
