"""Dense weights repacked into streaming order; `csrc/cpu/products/gemm.cpp`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.config.memory.weights.formats import COMPACT_ISAS, PANEL
from quire.ops.contracts.operands import LinearWeight
from quire.ops.cpu.library import UNSUPPORTED, check, isa, load
from quire.ops.cpu.runtime.dtypes import COMPACT, DTYPES, WEIGHT_DTYPES
from quire.ops.cpu.runtime.memory import give_back, weight_zeros
from quire.ops.cpu.runtime.rows import readable_rows

lib = load()


def pack_linear(parts: Sequence[Tensor], *, dtype: torch.dtype) -> LinearWeight:
    """See `Ops.pack_linear`. Each part is read straight into panels of 32 rows.

    bfloat16 is packed in 12 bits without loss where it can be and pays: where products take so few instructions that
    there is time to expand it as fast as memory brings it.
    """
    out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
    packed = None
    if dtype == torch.bfloat16 and isa() in COMPACT_ISAS:
        packed = _pack(_whole_panels(parts), COMPACT, out_features, in_features)
    if packed is None:
        packed = _pack(parts, dtype, out_features, in_features)
    assert packed is not None
    return LinearWeight(out_features=out_features, in_features=in_features, format="dense", tensors={"packed": packed})


def _whole_panels(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts, in one if some of them meet inside a panel: a compact panel is made at once."""
    return parts if all(part.shape[0] % PANEL == 0 for part in parts[:-1]) else [torch.cat(tuple(parts))]


def _pack(parts: Sequence[Tensor], dtype: torch.dtype, out_features: int, in_features: int) -> Tensor | None:
    """None where the weight does not fit the compact form."""
    packed = weight_zeros(lib.qr_packed_bytes(WEIGHT_DTYPES[dtype], out_features, in_features)).view(dtype)
    offset = 0
    for part in parts:
        for rows in readable_rows(part):
            status = lib.qr_pack_linear(
                packed.data_ptr(),
                WEIGHT_DTYPES[dtype],
                out_features,
                in_features,
                rows.data_ptr(),
                DTYPES[rows.dtype],
                rows.shape[0],
                rows.stride(0),
                offset,
            )
            if dtype == COMPACT and status == UNSUPPORTED:
                give_back(packed)
                return None
            check(status)
            offset += rows.shape[0]
    return packed
