"""Linear layers over int8 and int4 weights; `csrc/cpu/kernels/gemm_quantized.h`.

Activations are quantised to int8 on the way in, each group of a row by its largest magnitude. Products are summed as
integers within a group and as float32 over groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.ops.cpu.dtypes import ACTIVATIONS, DTYPES
from quire.ops.cpu.library import check, load
from quire.ops.cpu.memory import empty, weight_zeros
from quire.ops.cpu.rows import readable_rows
from quire.ops.operands import LinearWeight, QuantizedRows
from quire.utils.math import cdiv

lib = load()
PANEL = 32
"""Output features that are stored together."""
INT8, INT4 = 1, 2
"""By `qr_format`."""
FORMATS = {
    "int8": (INT8, 0),
    "int4_g32": (INT4, 32),
    "int4_g64": (INT4, 64),
    "int4_g128": (INT4, 128),
}
"""Name -> (`qr_format`, input features that share a scale; 0: all)."""


def quantize_linear(parts: Sequence[Tensor], *, format: str) -> LinearWeight:
    """Concatenate weights [N_i, M] along N and quantise each output feature, or each group of it, symmetrically.

    int8: scale = largest magnitude / 127. int4: the element of largest magnitude becomes -8, so that the sixteen values
    -8 .. 7 are all used; its sign goes to the scale.
    """
    code, group = FORMATS[format]
    out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
    packed = weight_zeros(lib.qr_quantized_bytes(code, out_features, in_features))
    scales = _empty_scales(code, group, out_features, in_features)
    offset = 0
    for part in parts:
        for rows in readable_rows(part):
            check(
                lib.qr_quantize_linear(
                    packed.data_ptr(),
                    scales.data_ptr(),
                    code,
                    group,
                    out_features,
                    in_features,
                    rows.data_ptr(),
                    DTYPES[rows.dtype],
                    rows.shape[0],
                    rows.stride(0),
                    offset,
                )
            )
            offset += rows.shape[0]
    return LinearWeight(
        out_features=out_features,
        in_features=in_features,
        format=format,
        tensors={"packed": packed, "scales": scales},
    )


def pack_quantized(stored: Sequence[QuantizedRows | Tensor]) -> LinearWeight:
    """See `functional.pack_quantized`: four bits in groups of 32, 64 or 128, and eight bits with a scale for a row."""
    parts = [part for part in stored if isinstance(part, QuantizedRows)]
    if len(parts) < len(stored):
        raise ConfigError("the kernels have no product with weights that are quantised in part")
    first, shape = parts[0], (sum(part.shape[0] for part in parts), parts[0].shape[1])
    format = format_of(first)
    if format is None or any(format_of(part) != format for part in parts):
        raise ConfigError(f"the kernels have no product with weights of {describe(first)}")
    code, group = FORMATS[format]
    tensors = {
        "packed": weight_zeros(lib.qr_quantized_bytes(code, *shape)),
        "scales": _empty_scales(code, group, *shape),
    }
    if any(part.zero_points is not None for part in parts):
        tensors["corrections"] = torch.zeros(tensors["scales"].shape, dtype=torch.int8)
    offset = 0
    for part in parts:
        _pack(tensors["packed"], code, shape[0], part.values + 8 if code == INT4 else part.values, offset)
        _place(tensors["scales"], code, part.scales, offset)
        if part.zero_points is not None:
            _place(tensors["corrections"], code, -part.zero_points, offset)
        offset += part.shape[0]
    return LinearWeight(out_features=shape[0], in_features=shape[1], format=format, tensors=tensors)


def format_of(rows: QuantizedRows) -> str | None:
    """The name of the format that the kernels keep it in; None where they have none."""
    is_plain = rows.order is None and rows.levels is None and rows.offsets is None
    if not is_plain or rows.values.dtype != torch.int8:
        return None
    if rows.bits == 4:
        return f"int4_g{rows.group_size}" if f"int4_g{rows.group_size}" in FORMATS else None
    return "int8" if rows.scales.shape[1] == 1 and rows.zero_points is None else None


def describe(rows: QuantizedRows) -> str:
    """For messages."""
    traits = (("zero points", rows.zero_points), ("offsets", rows.offsets), ("levels", rows.levels))
    extras = [name for name, part in (*traits, ("an order of inputs", rows.order)) if part is not None]
    with_extras = f" with {', '.join(extras)}" if extras else ""
    return f"{rows.bits} bits ({rows.values.dtype}) in groups of {rows.group_size}{with_extras}"


def quantized_linear(
    out: Tensor,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    *,
    activation: str | None,
    residual: Tensor | None,
) -> None:
    """`functional.linear` where weight.format is in FORMATS. Mutates: out."""
    rows, in_features = x.shape
    code, group = FORMATS[weight.format]
    corrections = weight.tensors.get("corrections")
    check(
        lib.qr_linear_quantized(
            out.data_ptr(),
            DTYPES[out.dtype],
            x.data_ptr(),
            DTYPES[x.dtype],
            weight.tensors["packed"].data_ptr(),
            code,
            group,
            weight.tensors["scales"].data_ptr(),
            None if corrections is None else corrections.data_ptr(),
            rows,
            weight.out_features,
            in_features,
            None if bias is None else bias.data_ptr(),
            ACTIVATIONS[activation],
            None if residual is None else residual.data_ptr(),
        )
    )


def quantized_gated_linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, *, activation: str) -> Tensor:
    """`functional.gated_linear` where weight.format is in FORMATS."""
    rows, in_features = x.shape
    code, group = FORMATS[weight.format]
    half = weight.out_features // 2
    out = empty((rows, half), x.dtype)
    corrections = weight.tensors.get("corrections")
    check(
        lib.qr_gated_linear_quantized(
            out.data_ptr(),
            x.data_ptr(),
            DTYPES[x.dtype],
            weight.tensors["packed"].data_ptr(),
            code,
            group,
            weight.tensors["scales"].data_ptr(),
            None if corrections is None else corrections.data_ptr(),
            rows,
            half,
            in_features,
            None if bias is None else bias.data_ptr(),
            ACTIVATIONS[activation],
        )
    )
    return out


def _pack(packed: Tensor, code: int, out_features: int, values: Tensor, offset: int) -> None:
    values = values.to(torch.int8)
    if values.stride(1) != 1:
        values = values.contiguous()
    check(
        lib.qr_pack_quantized(
            packed.data_ptr(),
            code,
            out_features,
            values.shape[1],
            values.data_ptr(),
            values.shape[0],
            values.stride(0),
            offset,
        )
    )


def _empty_scales(code: int, group: int, out_features: int, in_features: int) -> Tensor:
    """[panels, 32] float32 for int8, [panels, groups, 32] float16 for int4."""
    panels = cdiv(out_features, PANEL)
    if code == INT8:
        return torch.zeros(panels, PANEL)
    return torch.zeros(panels, cdiv(in_features, group), PANEL, dtype=torch.float16)


def _place(target: Tensor, code: int, values: Tensor, offset: int) -> None:
    """Put values [rows, groups] of rows offset .. into their panels."""
    rows = torch.arange(offset, offset + values.shape[0])
    if code == INT8:
        target.view(-1)[rows] = values.squeeze(1)
    else:
        target[rows // PANEL, :, rows % PANEL] = values.to(target.dtype)
