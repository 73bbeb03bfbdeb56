"""Where tensors begin, and what else is a multiple of 16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from quire.ops.triton.variant import Variant

ALIGNMENT = 16
"""Bytes that one thread loads at a time, at most."""
SIZES = ("num_features", "num_inputs", "num_codes", "num_columns")
"""Parameters that are multiples of it in the shapes of models, beside pointers and strides."""


def aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes, which tensors of their own always do.

    A kernel is compiled anew for a pointer that does not, and may then add up in another order: a slice of rows would
    have other bits than the whole.
    """
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def in_models(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """Variants with the alignment that the shapes of models have: without it, tiles are not loaded ahead."""
    return tuple(replace(variant, aligned=_aligned_names(variant)) for variant in variants)


def _aligned_names(variant: Variant) -> frozenset[str]:
    types = variant.signature.items()
    return frozenset(name for name, type in types if type.startswith("*") or name in SIZES or "stride" in name)
