"""Views of the memory-mapped bytes of a safetensors file; pages that have been copied are given back to the system."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from quire.loader.safetensors_header import TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The dtypes that weights may have where they are not quantised."""
STORED_DTYPES = {
    **DTYPES,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""The dtypes that the tensors of a quantised weight may have."""


class MappedFile:
    """Views of a file's tensors. Pages are read when they are touched, and given back by `drop`."""

    def __init__(self, file: Path) -> None:
        with file.open("rb") as stream:
            # Copy-on-write rather than read-only, because torch warns about buffers that it could not write to.
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)

    def view(self, info: TensorInfo) -> Tensor:
        """The tensor's bytes in the file, in the checkpoint's dtype; copy what shall be kept."""
        dtype = STORED_DTYPES[info.dtype]
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        if info.start % dtype.itemsize:
            return self._copy(info, dtype)
        count = math.prod(info.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=info.start).view(info.shape)

    def _copy(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """For files whose header has an odd length: torch cannot view unaligned bytes."""
        data = bytearray(self._map[info.start : info.start + info.num_bytes])
        return torch.frombuffer(data, dtype=dtype).view(info.shape)

    def drop(self, info: TensorInfo) -> None:
        """Give the tensor's pages back, as far as it has them for itself."""
        first = -(-info.start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (info.start + info.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
