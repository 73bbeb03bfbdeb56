"""Linear layers and embedding rows.

Row invariance: `linear` and `gated_linear` compute with the kernels of `products` and `quantized_products`, in which a
row's sum does not depend on the other rows. With `library_rows`, products of so many rows or more go to torch, whose
library chooses how it adds up by the number of rows: the promise does not hold then, and 16-bit gates and ups are
rounded before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.contracts.operands import BlockTable, LinearWeight
from quire.ops.shared.dequantize import dequantize
from quire.ops.triton.alignment import ALIGNMENT, aligned
from quire.ops.triton.elementwise import finish_product
from quire.ops.triton.elementwise import soft_cap as cap_softly
from quire.ops.triton.hopper import GATED, PLAIN, HopperTiles, is_hopper
from quire.ops.triton.kernels.arithmetic import ACTIVATION_CODES
from quire.ops.triton.kernels.products import dense_kernel, dense_tma_kernel
from quire.ops.triton.quantized import dequantized, quantized_product
from quire.ops.triton.sampling import row_max_tensors
from quire.ops.triton.tiles import Tile, Tiles, dense_tiles, stages


def pack_linear(parts: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device | None = None) -> LinearWeight:
    """See `Ops.pack_linear`. Layout: [N, M], row by row, on `device`; None for that of the first part."""
    num_features, num_inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    weight = torch.empty(num_features, num_inputs, dtype=dtype, device=device or parts[0].device)
    start = 0
    for part in parts:
        weight[start : start + part.shape[0]] = part
        start += part.shape[0]
    return LinearWeight(out_features=num_features, in_features=num_inputs, format="dense", tensors={"weight": weight})


def linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    library_rows: int | None = None,
) -> Tensor:
    """See `Ops.linear`."""
    out = x.new_empty(x.shape[0], weight.out_features, dtype=out_dtype or x.dtype)
    if x.shape[0]:
        _fill(out, x, weight, bias, residual, activation, library_rows)
    return out


def linear_max(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    soft_cap: float | None = None,
    library_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `Ops.linear_max`."""
    out = linear(x, weight, bias, out_dtype=torch.float32, library_rows=library_rows)
    if soft_cap is not None:
        cap_softly(out, soft_cap)
    return row_max_tensors(out)


def gated_linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, activation: str, library_rows: int | None = None
) -> Tensor:
    """See `Ops.gated_linear`."""
    out = x.new_empty(x.shape[0], weight.out_features // 2)
    if not x.shape[0]:
        return out
    if _is_for_library(x, library_rows):
        finish_product(out, _library_product(x, weight, out.dtype), bias, None, activation, gated=True)
    elif weight.format == "mixed":  # the two halves of a feature may lie in different parts
        finish_product(out, linear(x, weight, bias, out_dtype=torch.float32), None, None, activation, gated=True)
    else:
        _product(out, x, weight, bias, None, activation, gated=True)
    return out


def tiles_agree(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a row has the same bits in every tile on this device. Where it has not, rows are not invariant."""
    generator, outs = torch.Generator().manual_seed(0), []
    x, table = (torch.randn(rows, 1024, generator=generator).to(device, dtype) for rows in (70, 256))
    for tile in _product_tiles(dtype, gated=False).all():
        outs.append(x.new_empty(len(x), len(table), dtype=torch.float32))
        _dense_product(outs[-1], x, table, None, None, None, tile, gated=False)
    return all(torch.equal(out, outs[0]) for out in outs)


def embedding(token_ids: Tensor, table: Tensor | LinearWeight | BlockTable) -> Tensor:
    """See `Ops.embedding`."""
    if isinstance(table, BlockTable):
        return dequantize(table.rows[token_ids]).to(table.dtype)
    rows = table.tensors["weight"] if isinstance(table, LinearWeight) else table
    return rows.index_select(0, token_ids)


def _fill(
    out: Tensor,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    library_rows: int | None,
) -> None:
    """`linear`. Mutates: out, whose rows may be parts of longer ones, as those of residual may."""
    if weight.format == "mixed":
        sizes, start = [part.out_features for part in weight.parts], 0
        for part, size in zip(weight.parts, sizes, strict=True):
            columns = slice(start, start + size)
            own_bias = None if bias is None else bias[columns]
            own_residual = None if residual is None else residual[:, columns]
            _fill(out[:, columns], x, part, own_bias, own_residual, activation, library_rows)
            start += size
    elif _is_for_library(x, library_rows):
        product = _library_product(x, weight, out.dtype)
        finish_product(out, product, bias, residual, activation, gated=False)
    else:
        _product(out, x, weight, bias, residual, activation, gated=False)


def _product(
    out: Tensor,
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    *,
    gated: bool,
) -> None:
    if weight.format != "dense":
        quantized_product(out, x, weight, bias, residual, activation, gated=gated)
        return
    x, table = aligned(x), weight.tensors["weight"]
    tiles = _product_tiles(table.dtype if x.dtype == table.dtype else torch.float32, gated=gated)
    _dense_product(out, x, table, bias, residual, activation, tiles.of(x.shape[0], out.shape[1]), gated=gated)


def _product_tiles(dtype: torch.dtype, *, gated: bool) -> Tiles | HopperTiles:
    """For activations and weights of this type."""
    if dtype == torch.float32 or not is_hopper():
        return dense_tiles(dtype)
    return GATED if gated else PLAIN


def _dense_product(
    out: Tensor,
    x: Tensor,
    table: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
    tile: Tile,
    *,
    gated: bool,
) -> None:
    """`_product` in tiles of one size, by the copy engine where these ask for it and it can."""
    (num_rows, num_inputs), num_features = x.shape, out.shape[1]
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_features, tile.features),)
    constants: dict[str, int] = {
        "ACTIVATION": ACTIVATION_CODES[activation],
        "GATED": gated,
        "BLOCK_ROWS": tile.rows,
        "BLOCK_FEATURES": tile.features,
        "BLOCK_INPUTS": tile.inputs,
        "num_warps": tile.num_warps,
        "num_stages": stages(tile),
    }
    residual_stride = 0 if residual is None else residual.stride(0)
    if tile.tma and can_describe(x) and can_describe(table):
        described = (
            TensorDescriptor.from_tensor(x, [tile.rows, tile.inputs]),
            TensorDescriptor.from_tensor(table, [tile.features, tile.inputs]),
        )
        dense_tma_kernel[grid](
            *described, bias, residual, out, num_rows, num_features, num_inputs, residual_stride, out.stride(0),
            **constants,
        )  # fmt: skip
        return
    dense_kernel[grid](
        x, table, bias, residual, out, num_rows, num_features, num_inputs,
        x.stride(0), table.stride(0), residual_stride, out.stride(0),
        WHOLE=num_features % tile.features == 0 == num_inputs % tile.inputs, **constants,
    )  # fmt: skip


def can_describe(x: Tensor) -> bool:
    """Whether the copy engine reads a matrix: its address and the distance of its rows are multiples of 16 bytes."""
    return is_hopper() and x.stride(1) == 1 and x.stride(0) * x.itemsize % ALIGNMENT == 0 == x.data_ptr() % ALIGNMENT


def _is_for_library(x: Tensor, library_rows: int | None) -> bool:
    return library_rows is not None and x.shape[0] >= library_rows


def _library_product(x: Tensor, weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """x @ weight.T by torch, in float32 if the result is to be, else in x's type. Shapes: -> [T, N]."""
    if weight.format == "mixed":
        return torch.cat([_library_product(x, part, dtype) for part in weight.parts], dim=1)
    table = weight.tensors["weight"] if weight.format == "dense" else dequantized(weight, x.dtype)
    if table.dtype != x.dtype or (dtype == torch.float32 and not x.is_cuda):
        return x.float() @ table.float().t()
    if dtype == torch.float32 and x.dtype != torch.float32:
        return torch.mm(x, table.t(), out_dtype=torch.float32)
    return x @ table.t()
