"""Attention over latents: each head's products and copies around them, as two ops; `csrc/cpu/attention/latent.cpp`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quire.ops.contracts.operands import HeadWeights, LatentSpec
from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.dtypes import DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.cpu.runtime.weights import words_of

lib = load()
_written: WeakKeyDictionary[HeadWeights, Tensor] = WeakKeyDictionary()
"""The `qr_weight`s of the heads: graphs refer to them, as long as their model lives."""


def latent_qkv(
    query: Tensor,
    compressed: Tensor,
    norm: Tensor,
    to_latents: HeadWeights,
    spec: LatentSpec,
    index_key: Tensor | None = None,
) -> Tensor:
    """See `Ops.latent_qkv`."""
    tokens = query.shape[0]
    qkv = empty((tokens, (spec.num_heads + 2) * spec.head_size), query.dtype)
    check(
        lib.qr_latent_qkv(
            qkv.data_ptr(),
            query.data_ptr(),
            compressed.data_ptr(),
            DTYPES[query.dtype],
            norm.data_ptr(),
            spec.norm_eps,
            _address(to_latents),
            tokens,
            spec.num_heads,
            spec.rope_size,
            spec.nope_size,
            spec.latent_size,
            spec.head_size,
            None if index_key is None else index_key.data_ptr(),
            0 if index_key is None else index_key.shape[1],
        )
    )
    return qkv


def latent_values(attended: Tensor, to_values: HeadWeights, spec: LatentSpec) -> Tensor:
    """See `Ops.latent_values`."""
    tokens = attended.shape[0]
    values = empty((tokens, spec.num_heads * spec.value_size), attended.dtype)
    check(
        lib.qr_latent_values(
            values.data_ptr(),
            attended.data_ptr(),
            DTYPES[attended.dtype],
            _address(to_values),
            tokens,
            spec.num_heads,
            spec.rope_size,
            spec.latent_size,
            spec.value_size,
            spec.head_size,
        )
    )
    return values


def _address(weights: HeadWeights) -> int:
    written = _written.get(weights)
    if written is None:
        words = [word for head in weights.heads for word in words_of(head)]
        written = _written[weights] = torch.tensor(words, dtype=torch.int64)
    return written.data_ptr()
