"""Elementwise ops; `csrc/cpu/elementwise.cpp`, or plain torch where the library has none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from quire.config.layers.experts import ClampedGate
from quire.ops.cpu.library import check, load
from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.dtypes import DTYPES
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared import elementwise

lib = load()


def scale_add(x: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
    """See `Ops.scale_add`."""
    out = empty(x.shape, x.dtype)
    added = None if residual is None else residual.data_ptr()
    check(lib.qr_scale_add(out.data_ptr(), x.data_ptr(), added, DTYPES[x.dtype], scale, x.numel()))
    return out


def activate(x: Tensor, activation: str, parameters: tuple[float, ...] = ()) -> None:
    """See `Ops.activate`."""
    run_or_note(partial(elementwise.activate, activation=activation, parameters=parameters), x)


def clip(x: Tensor, limit: float) -> None:
    """See `Ops.clip`."""
    run_or_note(partial(elementwise.clip, limit=limit), x)


def gate(x: Tensor, gates: Tensor, activation: str = "sigmoid") -> None:
    """See `Ops.gate`."""
    run_or_note(partial(elementwise.gate, activation=activation), x, gates)


def gated_activation(both: Tensor, activation: str | ClampedGate) -> Tensor:
    """See `Ops.gated_activation`."""
    out = empty((both.shape[0], both.shape[1] // 2), both.dtype)
    run_or_note(partial(elementwise.fill_gated_activation, activation=activation), out, both)
    return out


def pair_values(qkv: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """See `Ops.pair_values`."""
    out = empty((qkv.shape[0], 2 * qkv.shape[1]), qkv.dtype)
    run_or_note(partial(elementwise.fill_pairs, num_heads=num_heads, num_kv_heads=num_kv_heads), out, qkv)
    return out


def bias_keys(query: Tensor, key: Tensor, value: Tensor, times: Tensor, decay: Tensor, scale: float) -> Tensor:
    """See `Ops.bias_keys`."""
    out = empty((query.shape[0], elementwise.biased_size(query, key, times)), query.dtype)
    run_or_note(partial(elementwise.fill_biased_keys, scale=scale), out, query, key, value, times, decay)
    return out


def subtract_heads(x: Tensor, factor: float) -> Tensor:
    """See `Ops.subtract_heads`."""
    out = empty((x.shape[0], x.shape[1] // 2), x.dtype)
    run_or_note(partial(elementwise.fill_differences, factor=factor), out, x)
    return out


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """See `Ops.join_columns`."""
    out = empty((parts[0].shape[0], sum(part.shape[1] for part in parts)), parts[0].dtype)
    run_or_note(elementwise.fill_columns, out, *parts)
    return out


def scale_shift(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> None:
    """See `Ops.scale_shift`."""
    run_or_note(elementwise.scale_shift, x, weights, residual)


def scale_heads(x: Tensor, weight: Tensor) -> None:
    """See `Ops.scale_heads`."""
    run_or_note(elementwise.scale_heads, x, weight)


def scale_tokens(x: Tensor, scales: Tensor, positions: Tensor) -> None:
    """See `Ops.scale_tokens`."""
    run_or_note(elementwise.scale_tokens, x, scales, positions)


def soft_cap(logits: Tensor, cap: float) -> None:
    """See `Ops.soft_cap`."""
    check(lib.qr_soft_cap(logits.data_ptr(), cap, logits.numel()))
