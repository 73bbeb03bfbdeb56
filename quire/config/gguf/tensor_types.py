"""The types that a tensor of a GGUF file may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TensorType:
    """Blocks of neighbouring elements of a row, stored one after the other."""

    id: int
    """In the file."""
    name: str
    block_size: int
    """Elements of a block; 1 for plain numbers."""
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        kind.id: kind
        for kind in (
            TensorType(0, "F32", 1, 4),
            TensorType(1, "F16", 1, 2),
            TensorType(2, "Q4_0", 32, 18),
            TensorType(3, "Q4_1", 32, 20),
            TensorType(6, "Q5_0", 32, 22),
            TensorType(7, "Q5_1", 32, 24),
            TensorType(8, "Q8_0", 32, 34),
            TensorType(9, "Q8_1", 32, 40),
            TensorType(10, "Q2_K", 256, 84),
            TensorType(11, "Q3_K", 256, 110),
            TensorType(12, "Q4_K", 256, 144),
            TensorType(13, "Q5_K", 256, 176),
            TensorType(14, "Q6_K", 256, 210),
            TensorType(15, "Q8_K", 256, 292),
            TensorType(16, "IQ2_XXS", 256, 66),
            TensorType(17, "IQ2_XS", 256, 74),
            TensorType(18, "IQ3_XXS", 256, 98),
            TensorType(19, "IQ1_S", 256, 50),
            TensorType(20, "IQ4_NL", 32, 18),
            TensorType(21, "IQ3_S", 256, 110),
            TensorType(22, "IQ2_S", 256, 82),
            TensorType(23, "IQ4_XS", 256, 136),
            TensorType(24, "I8", 1, 1),
            TensorType(25, "I16", 1, 2),
            TensorType(26, "I32", 1, 4),
            TensorType(27, "I64", 1, 8),
            TensorType(28, "F64", 1, 8),
            TensorType(29, "IQ1_M", 256, 56),
            TensorType(30, "BF16", 1, 2),
            TensorType(34, "TQ1_0", 256, 54),
            TensorType(35, "TQ2_0", 256, 66),
            TensorType(39, "MXFP4", 32, 17),
        )
    }
)
"""By id. Not all of them are read as weights: those of `PLAIN` and `QUANTIZED` are."""
BY_NAME: Mapping[str, TensorType] = MappingProxyType({kind.name: kind for kind in TENSOR_TYPES.values()})
PLAIN = ("F32", "F16", "BF16")
"""Types of weights that are numbers as they stand."""


@dataclass(frozen=True, slots=True)
class QuantizedType:
    """What `QuantizedRows` of a type have; see there."""

    bits: int
    group_size: int
    has_offsets: bool = False
    has_levels: bool = False
    has_nested_scales: bool = False


QUANTIZED: Mapping[str, QuantizedType] = MappingProxyType(
    {
        "Q4_0": QuantizedType(4, 32),
        "Q4_1": QuantizedType(4, 32, has_offsets=True),
        "Q5_0": QuantizedType(5, 32),
        "Q5_1": QuantizedType(5, 32, has_offsets=True),
        "Q8_0": QuantizedType(8, 32),
        "Q2_K": QuantizedType(2, 16, has_offsets=True, has_nested_scales=True),
        "Q3_K": QuantizedType(3, 16, has_nested_scales=True),
        "Q4_K": QuantizedType(4, 32, has_offsets=True, has_nested_scales=True),
        "Q5_K": QuantizedType(5, 32, has_offsets=True, has_nested_scales=True),
        "Q6_K": QuantizedType(6, 16, has_nested_scales=True),
        "IQ4_NL": QuantizedType(4, 32, has_levels=True),
        "IQ4_XS": QuantizedType(4, 32, has_levels=True, has_nested_scales=True),
        "MXFP4": QuantizedType(4, 32, has_levels=True),
        "TQ1_0": QuantizedType(2, 128),
        "TQ2_0": QuantizedType(2, 128),
    }
)
"""The quantised types that are read, by name."""
