"""What NVIDIA GPUs have from Hopper on, as this machine's current GPU says."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = (9, 0)


@cache
def is_hopper() -> bool:
    """Whether there is such a GPU, or a newer one."""
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= HOPPER
