"""Memory for what is streamed: aligned, zero, in huge pages where the system allows."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21


def zeros(num_bytes: int) -> Tensor:
    """uint8 zeros, committed when first touched; 64-byte aligned, 2 MiB when large.

    Huge pages raise the read bandwidth of a streamed weight by a fifth (a page walk per 4 KiB is what they save). They
    must be asked for: `madvise` is the usual system setting.
    """
    padding = HUGE_PAGE if num_bytes >= HUGE_PAGE else 0
    region = mmap.mmap(-1, max(1, num_bytes) + padding, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if padding:
        try:
            region.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel built without them
            pass
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % padding if padding else 0
    return whole[start : start + num_bytes]
