"""What a checkpoint says of the KV cache: the type it was calibrated for, and what its scales are called. No torch.

compressed-tensors has `kv_cache_scheme` in config.json and `k_scale`, `v_scale` beside each layer's attention. Other
writers name the scales otherwise, and say nothing in config.json: then they are for 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from quire.config.quantized.stored import Headers, refuse
from quire.errors import shown

PAIRS = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
    ("kv_scale", "kv_scale"),
)
"""Names of the scales of keys and of values, within a layer's attention; the first pair that is there is read."""
TYPES = {"int": "int8", "float": "fp8"}
STRATEGIES = ("tensor", "attn_head")
DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKVCache:
    """A kv_cache_scheme."""

    dtype: str | None
    """int8 or fp8; None for a scheme that quire does not have."""
    has_scales: bool
    """Whether the checkpoint has them; else each token has its own."""
    scheme: str
    """As config.json says it."""


def read_kv_cache_scheme(scheme: Mapping[str, Any]) -> StoredKVCache:
    """That of compressed-tensors' quantization_config."""
    bits, kind, strategy = scheme.get("num_bits", 8), scheme.get("type", "int"), scheme.get("strategy", "tensor")
    dynamic, symmetric = scheme.get("dynamic", False), scheme.get("symmetric", True)
    is_known = type(bits) is int and bits == 8 and isinstance(kind, str) and kind in TYPES and symmetric is True
    is_known &= isinstance(dynamic, bool) and (dynamic or strategy in STRATEGIES)
    return StoredKVCache(dtype=TYPES[kind] if is_known else None, has_scales=not dynamic, scheme=shown(dict(scheme)))


def takes_scales(stored: StoredKVCache | None, kv_cache_dtype: str) -> bool:
    """Whether a KV cache of this type is scaled as the checkpoint says, where it has scales."""
    if stored is None:
        return kv_cache_dtype == "fp8"
    return stored.has_scales and stored.dtype == kv_cache_dtype


def find_kv_scales(attention: str, num_kv_heads: int, headers: Headers) -> tuple[str, str] | None:
    """The tensors with a layer's scales of keys and of values; None where it has none.

    Raises: CheckpointError where one is missing, or is neither one number nor one for each head.
    """
    pairs = [tuple(f"{attention}.{name}" for name in pair) for pair in PAIRS]
    for key, value in pairs:
        found = [(name, header) for name in (key, value) if (header := headers(name)) is not None]
        if not found:
            continue
        if len(found) == 1:
            raise refuse(found[0][0], "is there, and its counterpart of keys or values is missing")
        for name, header in found:
            if header.dtype not in DTYPES or prod(header.shape) not in (1, num_kv_heads):
                raise refuse(name, f"is {header.dtype} of shape {list(header.shape)}, not a scale for each kv head")
        return key, value
    return None
