"""Rows of tables of embeddings; `csrc/cpu/attention/cache.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.contracts.operands import BlockTable, LinearWeight
from quire.ops.cpu.library import check, load
from quire.ops.cpu.products.blocks import rows_of_blocks
from quire.ops.cpu.runtime.dtypes import COMPACT, WEIGHT_DTYPES
from quire.ops.cpu.runtime.memory import empty

lib = load()


def embedding(token_ids: Tensor, table: Tensor | LinearWeight | BlockTable) -> Tensor:
    """See `Ops.embedding`."""
    if isinstance(table, BlockTable):
        return rows_of_blocks(token_ids, table)
    rows = token_ids.shape[0]
    if isinstance(table, LinearWeight):
        packed = table.tensors["packed"]
        out = empty((rows, table.in_features), torch.bfloat16 if packed.dtype == COMPACT else packed.dtype)
        check(
            lib.qr_packed_rows(
                out.data_ptr(),
                packed.data_ptr(),
                WEIGHT_DTYPES[packed.dtype],
                table.out_features,
                table.in_features,
                token_ids.data_ptr(),
                rows,
            )
        )
        return out
    out = empty((rows, table.shape[1]), table.dtype)
    check(
        lib.qr_embedding(
            out.data_ptr(),
            table.data_ptr(),
            table.stride(0) * table.element_size(),
            table.shape[0],
            token_ids.data_ptr(),
            rows,
        )
    )
    return out
