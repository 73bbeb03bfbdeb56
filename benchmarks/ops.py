"""Native CPU ops against torch and against the machine's read bandwidth, measured in the same run.

    python -m benchmarks.ops [--rounds 5] [--dtype bfloat16] [--kinds linear,attention,rope,small,head,recurrent]
        [--formats int8 int4_g128 int8_g16 ...] [--without-dense] [--rows 1 16 512] [--out 4096 --in 4096]
        [--kv-cache-dtype bfloat16 int8 fp8] [--megabytes 800]

Every round measures each case once, in turn, so that a busy machine disturbs all alike; the table holds medians. A
linear layer cycles through `--megabytes` of weights, more than the caches hold, and writes to memory that it has
written before, as a recorded step does: new memory would cost more than the product. The flops of quantised ones are
integer operations. Attention and RoPE cycle through as much cache, up to 28 layers of it. Recurrent layers cycle
through as many states, up to 28 layers of them, whose reading and writing are their bytes; they are measured beside
the same layer in torch, whose rounds are few: it takes seconds for a prompt.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch.nn import functional as F

from quire.attention.context import AttentionMetadata
from quire.config.memory.weights.formats import BITS, BY_NAME, NESTED_BLOCK, Codes, Shift
from quire.ops.backends import Op, implementation_of
from quire.ops.contracts.operands import (
    ConvWeights,
    GatedDeltaWeights,
    LightningWeights,
    LinearWeight,
    Mamba2Weights,
    MambaWeights,
    NestedScales,
    QuantizedRows,
    RopeAndCacheSpec,
    StateMetadata,
)
from quire.ops.cpu import library
from quire.ops.cpu.products.gemm import linear_into
from quire.ops.cpu.runtime import memory

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
        cells = [f"{self.name:<34}", f"{time_s * 1e6:>10.1f}"]
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


def linear_cases(ops: dict[str, Op], args: argparse.Namespace) -> list[Case]:
    """Dense weights beside torch's, then quantised ones."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    cases = []
    for weights in (*([] if args.without_dense else [args.dtype]), *args.formats):
        dense = [torch.randn(args.out, args.inner).to(dtype) for _ in range(12 if weights == args.dtype else 0)]
        if weights == args.dtype:
            first = cast(LinearWeight, ops["pack_linear"]([dense[0]], dtype=dtype))
        else:
            first = quantized(ops, weights, args.out, args.inner)
        num_bytes = first.num_bytes
        copies = max(2, (args.megabytes << 20) // num_bytes)
        packed = [first, *(copy_of(first) for _ in range(copies - 1))]
        for rows in args.rows:
            x, out = torch.randn(rows, args.inner).to(dtype), torch.empty(rows, args.out, dtype=dtype)
            baseline = partial(by_torch, out, x, dense) if dense else None
            cases.append(
                Case(
                    name=f"linear {weights} M={rows}",
                    run=lambda call, x=x, out=out, packed=packed: linear_into(out, x, packed[call % len(packed)]),  # type: ignore[misc]
                    baseline=baseline,
                    calls=min(copies, 32) if rows <= 64 else 4,
                    num_bytes=num_bytes,
                    flops=2 * rows * args.out * args.inner,
                )
            )
    return cases


def quantized(ops: dict[str, Op], name: str, out: int, inner: int) -> LinearWeight:
    """Random values of a format of `config.memory.weights.formats`, as a checkpoint would bring them."""
    format = BY_NAME[name]
    bits = BITS[format.codes]
    known = {Codes.LEVELS: (0, 16), Codes.FLOAT8: (-127, 120), Codes.INT2: (-1, 2)}
    low, high = known.get(format.codes, (-(1 << bits - 1), 1 << bits - 1))
    values = torch.randint(low, high, (out, inner), dtype=torch.int8)
    if format.codes is Codes.FLOAT8:
        values = values.clamp(min=0).view(torch.float8_e4m3fn)
    groups = -(-inner // format.group) if format.group else 1
    shift = torch.randint(-8, 8, (out, groups), dtype=torch.int8)
    nested = tuple(
        NestedScales(
            codes=torch.randint(0, 64, (out, groups), dtype=torch.int8),
            units=torch.rand(out, -(-inner // NESTED_BLOCK)) / 4096,
        )
        for _ in range(format.num_nested)
    )
    scales = nested[0].numbers(format.group) if nested else torch.rand(out, groups) / 64
    offsets = (1 << bits - 1) * scales - nested[1].numbers(format.group) if len(nested) == 2 else shift / 64
    rows = QuantizedRows(
        values=values,
        bits=bits,
        scales=scales,
        group_size=format.group or inner,
        zero_points=shift if format.shift is Shift.ZERO_POINTS else None,
        offsets=offsets if format.shift is Shift.OFFSETS else None,
        levels=tuple(range(-60, 68, 8)) if format.codes is Codes.LEVELS else None,
        nested=nested,
    )
    return cast(LinearWeight, ops["pack_quantized"]([rows]))


def copy_of(weight: LinearWeight) -> LinearWeight:
    """In memory of its own, where packing would have put it."""
    tensors = {}
    for name, tensor in weight.tensors.items():
        tensors[name] = memory.zeros(tensor.numel() * tensor.itemsize).view(tensor.dtype).view(tensor.shape)
        tensors[name].copy_(tensor)
    return dataclasses.replace(weight, tensors=tensors)


@dataclass
class Layers:
    """The caches of some layers with Qwen3-0.6B's heads: 16 over 8 of 128 elements."""

    ops: dict[str, Op]
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    sequences: int
    context: int
    megabytes: int
    block_size: int = 32
    spec: RopeAndCacheSpec = field(
        default_factory=lambda: RopeAndCacheSpec(num_heads=16, num_kv_heads=8, head_size=128, rotary_dim=128)
    )

    def __post_init__(self) -> None:
        self.blocks = -(-self.context // self.block_size)
        self.slots = torch.arange(self.sequences * self.blocks * self.block_size)
        self.cos_sin = torch.randn(max(8192, self.context), self.spec.rotary_dim)
        self.norm = torch.ones(self.spec.head_size)
        qkv = self.qkv(self.slots.numel())
        self.caches = [self.allocate()]
        wanted = (self.megabytes << 20) // self.caches[0].nbytes
        self.caches += [self.allocate() for _ in range(min(27, max(1, wanted)))]
        for cache in self.caches:
            self.write(qkv, cache, self.slots)

    def allocate(self) -> torch.Tensor:
        return cast(
            torch.Tensor,
            self.ops["allocate_kv_cache"](
                num_blocks=self.sequences * self.blocks,
                block_size=self.block_size,
                num_kv_heads=self.spec.num_kv_heads,
                head_size=self.spec.head_size,
                dtype=self.kv_cache_dtype,
            ),
        )

    def qkv(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, (self.spec.num_heads + 2 * self.spec.num_kv_heads) * self.spec.head_size).to(
            self.dtype
        )

    def write(self, qkv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> object:
        positions = slots % (self.blocks * self.block_size)
        rope_and_cache = self.ops["rope_and_cache"]
        return rope_and_cache(qkv, positions, self.cos_sin, self.norm, self.norm, cache, slots, self.spec)

    def rope_case(self, queries: int) -> Case:
        """The last `queries` tokens of each sequence, all that a step does but the positions."""
        qkv = self.qkv(self.sequences * queries)
        slots = self.slots.view(self.sequences, -1)[:, self.context - queries : self.context].flatten()
        num_bytes = 2 * qkv.nbytes
        return Case(
            name=f"rope_and_cache {self.sequences} x {queries} at {self.context}, {_named(self.kv_cache_dtype)} KV",
            run=lambda call: self.write(qkv, self.caches[call % len(self.caches)], slots),
            calls=len(self.caches),
            num_bytes=num_bytes,
        )

    def attention_case(self, queries: int) -> Case:
        """Attention of the last `queries` tokens of each sequence."""
        heads, kv_heads, head_size = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_size
        query = torch.randn(self.sequences * queries, heads, head_size).to(self.dtype)
        metadata = AttentionMetadata(
            query_start=torch.arange(0, self.sequences * queries + 1, queries, dtype=torch.int32),
            seq_lens=torch.full((self.sequences,), self.context, dtype=torch.int32),
            block_tables=torch.arange(self.sequences * self.blocks, dtype=torch.int32).view(self.sequences, -1),
            block_size=self.block_size,
        )
        attention, layers = self.ops["paged_attention"], len(self.caches)
        return Case(
            name=f"attention {self.sequences} x {queries} at {self.context}, {_named(self.kv_cache_dtype)} KV",
            run=lambda call: attention(query, self.caches[call % layers], metadata, scale=head_size**-0.5),
            calls=layers if queries == 1 else 2,
            num_bytes=2 * self.sequences * self.context * kv_heads * head_size * self.kv_cache_dtype.itemsize,
            flops=2 * 2 * self.sequences * queries * heads * head_size * (self.context - (queries - 1) // 2),
        )


ATTENTION_SIZES = ((1, 128), (1, 1024), (1, 8192), (8, 128), (8, 2048), (32, 192))
"""Sequences and their context in a decode step."""
PREFILL_SIZES = (1024, 4096, 8192)


KV_DTYPES = {
    **{name: getattr(torch, name) for name in ("bfloat16", "float32", "float16", "int8")},
    "fp8": torch.float8_e4m3fn,
}


def attention_cases(ops: dict[str, Op], args: argparse.Namespace) -> list[Case]:
    dtype, kinds = getattr(torch, args.dtype), _kv_dtypes(args)
    cases = [
        Layers(ops, dtype, kind, sequences, context, args.megabytes).attention_case(1)
        for sequences, context in ATTENTION_SIZES
        for kind in kinds
    ]
    return cases + [
        Layers(ops, dtype, kind, 1, context, 0).attention_case(context) for context in args.prefill for kind in kinds
    ]


def rope_cases(ops: dict[str, Op], args: argparse.Namespace) -> list[Case]:
    dtype = getattr(torch, args.dtype)
    return [
        Layers(ops, dtype, kind, sequences, context, args.megabytes).rope_case(queries)
        for sequences, context, queries in ((1, 192, 1), (32, 192, 1), (1, 1024, 1024))
        for kind in _kv_dtypes(args)
    ]


def _named(dtype: torch.dtype) -> str:
    return next(name for name, known in KV_DTYPES.items() if known == dtype)


def _kv_dtypes(args: argparse.Namespace) -> list[torch.dtype]:
    return [KV_DTYPES[name] for name in args.kv_cache_dtype or [args.dtype]]


def small_cases(ops: dict[str, Op], args: argparse.Namespace) -> list[Case]:
    cases: list[Case] = []
    dtype = getattr(torch, args.dtype)
    weight, reference = torch.ones(1024), implementation_of("reference")
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
                name=f"row_max R={rows}",
                run=lambda _, logits=logits: ops["row_max"](logits),  # type: ignore[misc]
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


def by_torch(out: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor], call: int) -> None:
    """A product with one of the weights in turn."""
    torch.mm(x, weights[call % len(weights)].t(), out=out)


def head_cases(ops: dict[str, Op], args: argparse.Namespace) -> list[Case]:
    """The largest logit of each row; the baseline writes all logits and reads them again."""
    dtype = getattr(torch, args.dtype)
    weight = cast("LinearWeight", ops["pack_linear"]([(torch.randn(151_936, 1024) * 0.02).to(dtype)], dtype=dtype))

    room = torch.zeros(32, weight.out_features)  # as graphs have it: the same for each call

    def all_logits(x: torch.Tensor) -> None:
        logits = room[: len(x)]
        linear_into(logits, x, weight)
        ops["row_max"](logits)

    return [
        Case(
            name=f"linear_max M={rows}",
            run=lambda _, x=x: ops["linear_max"](x, weight),  # type: ignore[misc]
            baseline=lambda _, x=x: all_logits(x),  # type: ignore[misc]
            calls=4,
            num_bytes=weight.num_bytes,
        )
        for rows in (1, 8, 32)
        for x in [torch.randn(rows, 1024).to(dtype)]
    ]


@dataclass
class Recurrent:
    """An op over the states of some layers, which take turns."""

    name: str
    op: Callable[[dict[str, Op], torch.Tensor, torch.Tensor, StateMetadata], object]
    columns: int
    numbers: int
    """Of a state."""

    def case(self, ops: dict[str, Op], args: argparse.Namespace, sequences: int, tokens: int) -> Case:
        """Sequences that have a state already, with so many tokens each."""
        num_bytes = 4 * (self.numbers + self.numbers % 2)
        wanted = (args.megabytes << 20) // (2 * sequences * num_bytes)
        states = [
            cast(torch.Tensor, ops["allocate_states"](num_blocks=2 * sequences, num_bytes=num_bytes)).fill_(0.01)
            for _ in range(max(2, min(28, wanted)))
        ]
        x = torch.randn(sequences * tokens, self.columns).to(getattr(torch, args.dtype))
        step = StateMetadata(
            query_start=torch.arange(0, sequences * tokens + 1, tokens, dtype=torch.int32),
            reads=torch.arange(sequences, dtype=torch.int32),
            writes=torch.arange(sequences, 2 * sequences, dtype=torch.int32),
        )
        reference = implementation_of("reference")
        return Case(
            name=f"{self.name} {sequences} x {tokens}",
            run=lambda call: self.op(ops, x, states[call % len(states)], step),
            baseline=lambda call: self.op(reference, x, states[call % len(states)], step),
            calls=len(states) if tokens == 1 else 1,
            num_bytes=2 * sequences * num_bytes,
        )


def recurrent_cases(ops: dict[str, Op], args: argparse.Namespace) -> list[Case]:
    """A layer of Mamba 2 of 64 heads of 64 channels, of Mamba with 3072 channels, of LFM2 with 2048, of Qwen3-Next and
    of MiniMax-Text-01."""
    layers = (
        mamba2_layer(64, 64, 128),
        mamba_layer(3072, 16, 96, getattr(torch, args.dtype)),
        short_conv_layer(2048),
        gated_delta_layer(32, 16, 128),
        channel_delta_layer(32, 128),
        lightning_layer(64, 128),
    )
    return [layer.case(ops, args, *size) for layer in layers for size in ((1, 1), (8, 1), (32, 1), (1, 512))]


def conv_weights(channels: int, width: int = 4) -> ConvWeights:
    return ConvWeights(weight=torch.randn(channels, width), bias=torch.randn(channels))


def mamba2_layer(heads: int, head_size: int, state_size: int) -> Recurrent:
    inner = heads * head_size
    weights = Mamba2Weights(
        conv=conv_weights(inner + 2 * state_size),
        num_groups=1,
        state_size=state_size,
        time_bias=torch.randn(heads),
        decay=-torch.rand(heads),
        skip=torch.randn(heads),
        norm=torch.ones(inner),
        norm_eps=1e-5,
    )
    numbers = weights.conv.num_inputs + inner * state_size
    return Recurrent(
        f"mamba2 {heads} x {head_size} x {state_size}",
        lambda ops, x, states, step: ops["mamba2"](x, weights, states, step),
        2 * inner + 2 * state_size + heads,
        numbers,
    )


def mamba_layer(channels: int, state_size: int, rank: int, dtype: torch.dtype) -> Recurrent:
    weights = {
        name: MambaWeights(
            conv=conv_weights(channels),
            derive=cast(LinearWeight, pack([torch.randn(rank + 2 * state_size, channels) / 64], dtype=dtype)),
            widen=cast(LinearWeight, pack([torch.randn(channels, rank) / 16], dtype=dtype)),
            time_bias=torch.randn(channels),
            decay=-torch.rand(channels, state_size),
            skip=torch.randn(channels),
        )
        for name in ("cpu", "reference")
        for pack in [implementation_of(name)["pack_linear"]]
    }
    reference = implementation_of("reference")["mamba"]
    return Recurrent(
        f"mamba {channels} x {state_size}",
        lambda ops, x, states, step: ops["mamba"](
            x, weights["reference" if ops["mamba"] is reference else "cpu"], states, step
        ),
        2 * channels,
        weights["cpu"].conv.num_inputs + channels * state_size,
    )


def short_conv_layer(channels: int) -> Recurrent:
    weights = conv_weights(channels, 3)
    return Recurrent(
        f"short_conv {channels}",
        lambda ops, x, states, step: ops["short_conv"](x, weights, states, step),
        3 * channels,
        weights.num_inputs,
    )


def gated_delta_layer(heads: int, key_heads: int, size: int) -> Recurrent:
    channels, inner = (2 * key_heads + heads) * size, heads * size
    weights = GatedDeltaWeights(
        conv=ConvWeights(weight=torch.randn(channels, 4), bias=None),
        num_key_heads=key_heads,
        key_size=size,
        time_bias=torch.randn(heads),
        decay=-torch.rand(heads),
        norm=torch.ones(size),
        norm_eps=1e-6,
    )
    return Recurrent(
        f"gated_delta {heads} x {size} x {size}",
        lambda ops, x, states, step: ops["gated_delta"](x, weights, states, step),
        channels + inner + 2 * heads,
        weights.conv.num_inputs + inner * size,
    )


def channel_delta_layer(heads: int, size: int) -> Recurrent:
    channels, inner = 3 * heads * size, heads * size
    weights = GatedDeltaWeights(
        conv=ConvWeights(weight=torch.randn(channels, 4), bias=None),
        num_key_heads=heads,
        key_size=size,
        time_bias=torch.randn(heads, size),
        decay=-torch.rand(heads),
        norm=torch.ones(size),
        norm_eps=1e-6,
        gates_by_sigmoid=True,
    )

    def run(ops: dict[str, Op], x: torch.Tensor, states: torch.Tensor, step: StateMetadata) -> object:
        """Gates and times are one tensor, to be measured without the products that give them."""
        gates = times = x[:, :inner].contiguous()
        return ops["gated_delta"](x, weights, states, step, gates=gates, times=times)

    return Recurrent(
        f"gated_delta by channel {heads} x {size} x {size}",
        run,
        channels + heads,
        weights.conv.num_inputs + inner * size,
    )


def lightning_layer(heads: int, size: int) -> Recurrent:
    weights = LightningWeights(decay=torch.rand(heads), norm=torch.ones(heads * size), norm_eps=1e-6)
    return Recurrent(
        f"lightning {heads} x {size} x {size}",
        lambda ops, x, states, step: ops["lightning_attention"](x, weights, states, step),
        4 * heads * size,
        heads * size * size,
    )


KINDS: dict[str, Callable[[dict[str, Op], argparse.Namespace], list[Case]]] = {
    "linear": linear_cases,
    "attention": attention_cases,
    "rope": rope_cases,
    "small": small_cases,
    "head": head_cases,
    "recurrent": recurrent_cases,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument(
        "--formats", nargs="*", default=["int8", "int4_g128"], help="of quantised weights", choices=BY_NAME
    )
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS, help="of linear layers")
    parser.add_argument("--without-dense", action="store_true", help="no linear layers over dense weights")
    parser.add_argument("--out", type=int, default=4096)
    parser.add_argument("--in", dest="inner", type=int, default=4096)
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--kv-cache-dtype", nargs="*", choices=KV_DTYPES, help="in turn; default: --dtype")
    parser.add_argument("--prefill", nargs="*", type=int, default=PREFILL_SIZES, help="tokens of prompts in attention")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated: " + ", ".join(KINDS))
    args = parser.parse_args()
    ops = implementation_of("cpu")
    read = read_bandwidth(args.megabytes)
    cases = [read, *(case for kind in args.kinds.split(",") for case in KINDS[kind](ops, args))]
    for _ in range(args.rounds):
        for case in cases:
            case.measure()
    bandwidth = read.num_bytes / statistics.median(read.times) / 1e9
    print(
        f"{library.isa()}, {library.num_threads()} threads, torch {torch.__version__} {torch.get_num_threads()} threads"
    )
    print(f"{'case':<34} {'us':>10} {'GB/s':>8} {'of read':>8} {'TFLOP/s':>8} {'torch us':>10} {'ratio':>8}")
    for case in cases:
        print(case.line(bandwidth))


if __name__ == "__main__":
    main()
