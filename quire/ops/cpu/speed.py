"""How fast this machine is with the native kernels: reading memory, and products of one row and of many."""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from quire.ops.contracts.operands import LinearWeight
from quire.ops.cpu import library
from quire.ops.cpu.products.gemm import linear
from quire.ops.cpu.products.packing import pack_linear
from quire.ops.cpu.products.quantized import quantize_linear
from quire.ops.cpu.runtime import memory

READ_BYTES = 512 << 20
"""More than any cache holds."""
FEATURES = 4096
"""Inputs and outputs of the products."""
MANY_ROWS = 512
ROUNDS = 5
QUANTISED = {"int8": "int8", "int4": "int4_g128"}
"""Name -> format of `Ops.quantize_linear`."""
FORMATS = ("bfloat16", "float16", "float32", *QUANTISED)


@dataclasses.dataclass(frozen=True, slots=True)
class Products:
    """Of one format of weights."""

    bytes_per_weight: float
    bandwidth: float
    """Bytes of weights a second in products of one row."""
    flops: float
    """A second, in products of `MANY_ROWS` rows."""


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory."""
    data, total = memory.zeros(READ_BYTES), ctypes.c_uint64()
    data.fill_(1)
    lib = library.load()
    return READ_BYTES / _seconds(lambda _: lib.qr_read_bandwidth(data.data_ptr(), READ_BYTES, ctypes.byref(total)))


def products(name: str) -> Products:
    """Measure one of `FORMATS`.

    Weights come from memory in turn, so none is in a cache when it is read again.
    """
    values = torch.randn(FEATURES, FEATURES)
    dtype: torch.dtype = torch.bfloat16 if name in QUANTISED else getattr(torch, name)
    if name in QUANTISED:
        first = quantize_linear([values], format=QUANTISED[name])
    else:
        first = pack_linear([values.to(dtype)], dtype=dtype)
    num_bytes = first.num_bytes
    weights = [first, *(_copy_of(first) for _ in range(READ_BYTES // num_bytes))]
    one, many = (torch.randn(rows, FEATURES).to(dtype) for rows in (1, MANY_ROWS))

    def read_all(_: int) -> None:
        for weight in weights:
            linear(one, weight)

    seconds = _seconds(lambda call: linear(many, weights[call % len(weights)]))
    return Products(
        bytes_per_weight=num_bytes / values.numel(),
        bandwidth=len(weights) * num_bytes / _seconds(read_all),
        flops=2 * MANY_ROWS * values.numel() / seconds,
    )


def _seconds(run: Callable[[int], object]) -> float:
    """The median of some calls, after one that does not count."""
    taken = []
    for call in range(ROUNDS + 1):
        began_at = time.perf_counter()
        run(call)
        taken.append(time.perf_counter() - began_at)
    return statistics.median(taken[1:])


def _copy_of(weight: LinearWeight) -> LinearWeight:
    """In memory of its own, where packing would have put it."""
    tensors = {name: memory.zeros(tensor.nbytes).view(tensor.dtype) for name, tensor in weight.tensors.items()}
    for name, tensor in weight.tensors.items():
        tensors[name] = tensors[name].view(tensor.shape).copy_(tensor)
    return dataclasses.replace(weight, tensors=tensors)
