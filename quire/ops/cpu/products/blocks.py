"""Weights in the blocks of GGUF files, taken apart natively; `csrc/cpu/products/blocks.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.config.gguf.tensor_types import BY_NAME
from quire.ops.contracts.operands import BlockRows, BlockTable
from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.dtypes import DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared.blocks import LEVELS

lib = load()
LEVELS_OF = {name: torch.tensor(levels, dtype=torch.int8) for name, levels in LEVELS.items()}
"""What codes stand for, as the library reads them; graphs refer to them."""


def range_of_blocks(rows: BlockRows) -> tuple[float, bool]:
    """The largest magnitude of all scales and offsets, NaN if one is not finite; whether float16 has all exactly.

    Of nested scales, of what their codes are multiplied with.
    """
    blocks, largest, are_halves = _readable(rows), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    check(
        lib.qr_block_range(
            largest.data_ptr(),
            are_halves.data_ptr(),
            BY_NAME[rows.type_name].id,
            blocks.data_ptr(),
            rows.shape[0],
            blocks.stride(0),
            rows.shape[1],
        )
    )
    return largest.item(), bool(are_halves.item())


def pack_blocks(tensors: dict[str, Tensor], rows: BlockRows, *, unit: float, out_features: int, offset: int) -> None:
    """Lay rows out in a weight of `out_features`, from row `offset` on; see `qr_pack_blocks`. Mutates: tensors."""
    blocks, second = _readable(rows), tensors.get("offsets")
    check(
        lib.qr_pack_blocks(
            tensors["packed"].data_ptr(),
            tensors["scales"].data_ptr(),
            None if second is None else second.data_ptr(),
            unit,
            BY_NAME[rows.type_name].id,
            out_features,
            rows.shape[1],
            blocks.data_ptr(),
            rows.shape[0],
            blocks.stride(0),
            offset,
        )
    )


def rows_of_blocks(token_ids: Tensor, table: BlockTable) -> Tensor:
    """`Ops.embedding` of a table in blocks."""
    rows, kind = table.rows, BY_NAME[table.rows.type_name]
    out = empty((token_ids.shape[0], rows.shape[1]), table.dtype)
    levels = LEVELS_OF.get(rows.type_name)
    check(
        lib.qr_block_rows(
            out.data_ptr(),
            DTYPES[out.dtype],
            kind.id,
            rows.blocks.data_ptr(),
            rows.shape[0],
            rows.blocks.stride(0),
            rows.shape[1],
            None if levels is None else levels.data_ptr(),
            token_ids.data_ptr(),
            out.shape[0],
        )
    )
    return out


def _readable(rows: BlockRows) -> Tensor:
    """The blocks, those of a row one after the other."""
    return rows.blocks if rows.blocks.stride(1) == 1 else rows.blocks.contiguous()
