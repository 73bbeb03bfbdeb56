"""Weight formats that any model can be loaded into, without calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from quire.ops.functional import pack_linear, quantize_linear
from quire.ops.operands import LinearWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """Formats of `functional.quantize_linear`; None keeps the model's dtype."""

    body: str | None = None
    """Of the layers."""
    head: str | None = None
    """Of the output head, whose errors go straight into the logits."""

    def pack(self, parts: Sequence[Tensor], dtype: torch.dtype, *, is_head: bool) -> LinearWeight:
        """Lay out the parts of a linear weight."""
        format = self.head if is_head else self.body
        return pack_linear(parts, dtype=dtype) if format is None else quantize_linear(parts, format=format)


DENSE = WeightScheme()
SCHEMES: Mapping[str | None, WeightScheme] = MappingProxyType(
    {
        None: DENSE,
        "int8": WeightScheme(body="int8", head="int8"),
        "int4": WeightScheme(body="int4_g128", head="int8"),
    }
)
"""By `--quantization`."""
