"""One weight in any layout that a format's config can ask for, by writers that share no code with quire.

`tests/quantized_checkpoints.py` has the layouts that the formats' own tools choose; here are all sizes of groups and
blocks, whether or not they divide a weight, every zero point, and the corners of each format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.quantized_checkpoints import AWQ_ORDER, NF4, Written, packed

CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}


def ct_config(*weights: Mapping[str, Any], layout: str = "pack-quantized") -> dict[str, Any]:
    """That of compressed-tensors, with a group of layers for each way to have weights."""
    groups = {
        f"group_{index}": {"targets": ["Linear"], "weights": dict(each), "format": layout}
        for index, each in enumerate(weights)
    }
    return {**CT, "format": layout, "config_groups": groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Which rows and which columns of a weight share a scale: the number of the part of each."""

    of_rows: Tensor
    of_columns: Tensor

    @classmethod
    def of(cls, weight: Tensor, size: int | None, *, block_rows: int = 1, shuffled: bool = False) -> Parts:
        """Groups of `size` columns, None for all of them; `shuffled` spreads a group's columns over the row."""
        rows, columns = (torch.arange(count) for count in weight.shape)
        groups = columns // (size or len(columns))
        if shuffled:
            groups = groups[torch.randperm(len(columns), generator=torch.Generator().manual_seed(5))]
        return cls(of_rows=rows // block_rows, of_columns=groups)

    def each(self, weight: Tensor, reduce: str) -> Tensor:
        """The least or the largest number of each part. Shapes: -> [parts of rows, parts of columns]"""
        counts = int(self.of_rows.max()) + 1, int(self.of_columns.max()) + 1
        places = (self.of_rows[:, None] * counts[1] + self.of_columns[None, :]).flatten()
        out = torch.zeros(counts[0] * counts[1]).scatter_reduce(0, places, weight.float().flatten(), reduce)
        return out.view(counts)  # with 0, which every range holds

    def wide(self, of_parts: Tensor) -> Tensor:
        """A part's number for each element."""
        return of_parts.float()[self.of_rows][:, self.of_columns]


def levels(weight: Tensor, parts: Parts, *, bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Unsigned values, zero points and scales of `dtype`, and the numbers that they stand for."""
    low, high, most = parts.each(weight, "amin"), parts.each(weight, "amax"), (1 << bits) - 1
    if symmetric:
        scales = (torch.maximum(-low, high).clamp(min=1e-6) * 2 / most).to(dtype)
        zeros = torch.full_like(low, (most + 1) // 2)
    else:
        scales = ((high - low).clamp(min=1e-6) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, most)
    values = (weight / parts.wide(scales) + parts.wide(zeros)).round().clamp(0, most)
    return values, zeros, scales, (values - parts.wide(zeros)) * parts.wide(scales)


def gptq(weight: Tensor, *, bits: int, size: int | None, symmetric: bool, shuffled: bool, v1: bool) -> Written:
    """As GPTQModel writes it: v1 takes 1 off every zero point of a word at once, so one of 0 borrows from the next."""
    parts = Parts.of(weight, size, shuffled=shuffled)
    values, zeros, scales, numbers = levels(weight, parts, bits=bits, symmetric=symmetric, dtype=torch.float16)
    words = packed(zeros.T, bits)
    if v1 and bits == 3:
        words = packed((zeros.T - 1) % 8, bits)
    elif v1:
        words = (words.long() - sum(1 << place for place in range(0, 32, bits))).to(torch.int32)
    tensors = {"qweight": packed(values, bits).T.contiguous(), "qzeros": words, "scales": scales.T.contiguous()}
    return Written(tensors={**tensors, "g_idx": parts.of_columns.int()}, weight=numbers)


def awq(weight: Tensor, *, size: int | None) -> Written:
    """AutoAWQ's GEMM layout."""
    parts = Parts.of(weight, size)
    values, zeros, scales, numbers = levels(weight, parts, bits=4, symmetric=False, dtype=torch.float16)
    words = [packed(of.T.reshape(of.shape[1], -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4) for of in (values, zeros)]
    return Written(tensors={"qweight": words[0], "qzeros": words[1], "scales": scales.T.contiguous()}, weight=numbers)


def ct_packed(
    weight: Tensor, *, bits: int, size: int | None, symmetric: bool, whole: bool = False, block_rows: int = 1
) -> Written:
    """pack-quantized; `whole` has one scale for the tensor, whose zero point is not packed, nor are those of blocks."""
    parts = Parts.of(weight, size, block_rows=len(weight) if whole else block_rows)
    values, zeros, scales, numbers = levels(weight, parts, bits=bits, symmetric=symmetric, dtype=torch.bfloat16)
    shape = torch.tensor(weight.shape)
    tensors = {"weight_packed": packed(values, bits), "weight_scale": scales, "weight_shape": shape}
    if whole:
        tensors["weight_scale"] = scales.view(1)
    if not symmetric:
        signed = (zeros - (1 << bits - 1)).to(torch.int8)
        tensors["weight_zero_point"] = packed(zeros.T, bits).T.contiguous()
        if whole or block_rows > 1:
            tensors["weight_zero_point"] = signed.view(1) if whole else signed
    return Written(tensors=tensors, weight=numbers)


def ct_int8(weight: Tensor, *, size: int | None, block_rows: int, symmetric: bool) -> Written:
    """int-quantized."""
    parts = Parts.of(weight, size, block_rows=block_rows)
    values, zeros, scales, numbers = levels(weight, parts, bits=8, symmetric=symmetric, dtype=torch.float32)
    tensors = {"weight": (values - 128).to(torch.int8), "weight_scale": scales}
    if not symmetric:
        tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
    return Written(tensors=tensors, weight=numbers)


def fp8(weight: Tensor, *, size: int | None, block_rows: int, name: str = "weight_scale_inv") -> Written:
    """8-bit floats in blocks."""
    parts = Parts.of(weight, size, block_rows=block_rows)
    scales = torch.maximum(-parts.each(weight, "amin"), parts.each(weight, "amax")).clamp(min=1e-6) / 448
    values = (weight / parts.wide(scales)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Written(tensors={"weight": values, name: scales}, weight=values.float() * parts.wide(scales))


def bnb_nf4(weight: Tensor, *, block: int, nested: bool, storage: torch.dtype) -> Written:
    """bitsandbytes' nf4. Blocks go on over the ends of rows; nested scales are codes about their mean."""
    flat = weight.float().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = blocks.abs().amax(1).clamp(min=1e-6)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.absmax": scales, "weight.quant_map": NF4}
    if nested:
        middle, table = float(scales.mean()), torch.linspace(-1, 1, 256)
        largest = (scales - middle).abs().max().clamp(min=1e-6).view(1)
        codes = ((scales - middle)[:, None] / largest - table).abs().argmin(1)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": middle}
        tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": table}
        tensors["weight.absmax"] = codes.to(torch.uint8)
        scales = table[codes] * largest + middle
    codes = torch.bucketize(blocks / scales[:, None], (NF4[1:] + NF4[:-1]) / 2).flatten()[: len(flat)]
    pairs = ((codes[0::2] << 4) | codes[1::2]).to(torch.uint8)
    tensors["weight"] = pairs.view(storage).unsqueeze(1)
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    numbers = NF4[codes] * scales.repeat_interleave(block)[: len(flat)]
    return Written(tensors=tensors, weight=numbers.view(weight.shape))
