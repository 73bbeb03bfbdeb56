"""Ops on several hidden states of each token, which the library has none for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from quire.ops.cpu.runtime.calls import run_or_note
from quire.ops.cpu.runtime.memory import empty
from quire.ops.shared import streams as plain


def match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    """See `Ops.match_rms`."""
    out = empty(x.shape, x.dtype)
    run_or_note(partial(plain.fill_matched, least=least), out, x, like)
    return out


def mix_streams(
    streams: Sequence[Tensor],
    inputs: Sequence[Tensor],
    routed: Tensor,
    weight: Tensor,
    *,
    scale: float,
    offset: float = 0.0,
) -> list[Tensor]:
    """See `Ops.mix_streams`."""
    out = [empty(stream.shape, stream.dtype) for stream in streams]
    run_or_note(partial(plain.fill_mixed, scale=scale, offset=offset), routed, weight, *out, *streams, *inputs)
    return out


def multiply_columns(x: Tensor, by: Tensor, *, first: int) -> None:
    """See `Ops.multiply_columns`."""
    run_or_note(partial(plain.multiply_columns, first=first), x, by)


def statistical_top_k(x: Tensor, size: int, cutoff: float) -> None:
    """See `Ops.statistical_top_k`."""
    run_or_note(partial(plain.statistical_top_k, size=size, cutoff=cutoff), x)
