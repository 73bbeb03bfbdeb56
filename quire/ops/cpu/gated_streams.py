"""Streams behind gates, and embeddings of n-grams: plain torch on one thread."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.ops.contracts.operands import ConvWeights, NGramHashes, StateMetadata
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared import gated_streams as plain


def open_streams(x: Tensor, gates: Tensor, *, count: int) -> Tensor:
    """See `Ops.open_streams`."""
    out = empty((x.shape[0], x.shape[1] // count), x.dtype)
    run_or_note(plain.fill_opened, out, x, gates)
    return out


def stream_shares(products: Tensor) -> Tensor:
    """See `Ops.stream_shares`."""
    out = empty(products.shape, products.dtype)
    run_or_note(plain.fill_shares, out, products)
    return out


def ngram_rows(
    token_ids: Tensor, hashes: NGramHashes, states: Tensor, metadata: StateMetadata, *, first: int
) -> Tensor:
    """See `Ops.ngram_rows`."""
    out = empty((token_ids.shape[0], hashes.rows.shape[0]), torch.int64)
    given = partial(plain.fill_rows, hashes=hashes, metadata=metadata, first=first)
    run_or_note(given, out, token_ids, states)
    return out


def gate_values(keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
    """See `Ops.gate_values`."""
    out = empty(keys.shape, keys.dtype)
    run_or_note(plain.fill_gated_values, out, keys, queries, values)
    return out


def dilated_conv(
    x: Tensor, residual: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata, *, step: int
) -> Tensor:
    """See `Ops.dilated_conv`."""
    out = empty(x.shape, x.dtype)
    given = partial(plain.fill_convolved, weights=weights, metadata=metadata, dilation=step)
    run_or_note(given, out, x, residual, states)
    return out
