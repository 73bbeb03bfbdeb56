"""Op names to callables; imported only where the library runs."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from quire.ops.cpu.gemm import gated_linear, linear, pack_linear

OPS: MappingProxyType[str, Callable[..., object]] = MappingProxyType(
    {
        "pack_linear": pack_linear,
        "linear": linear,
        "gated_linear": gated_linear,
    }
)
