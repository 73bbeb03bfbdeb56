"""Ops on several hidden states of each token, and on the gates of sparse MLPs: plain torch in every implementation.

Row invariance: rows are computed a few at a time, products and sums of two numbers are the same wherever they stand,
and a row's sum adds its second half to its first, again and again. What torch computes by a series is computed in
stretches of whole vectors, as in `elementwise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.ops.shared.elementwise import VECTOR
from quire.ops.threads import one_thread
from quire.utils.math import round_up

ROWS_AT_A_TIME = 32
"""That are widened to float32: some 2 MiB of temporaries for rows of 2048, and few calls for each row."""


def match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    """See `Ops.match_rms`."""
    out = torch.empty_like(x)
    fill_matched(out, x, like, least=least)
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
    out = [torch.empty_like(stream) for stream in streams]
    fill_mixed(routed, weight, *out, *streams, *inputs, scale=scale, offset=offset)
    return out


@one_thread()
def multiply_columns(x: Tensor, by: Tensor, *, first: int) -> None:
    """See `Ops.multiply_columns`."""
    x.mul_(by[:, first : first + x.shape[1]])


@one_thread()
def fill_matched(out: Tensor, x: Tensor, like: Tensor, *, least: float) -> None:
    """`Ops.match_rms`. Mutates: out."""
    for rows in _stretches(x):
        wide = x[rows].float()
        wanted, found = _mean(like[rows].float().square()), _mean(wide.square())
        out[rows] = wide * wanted.sqrt() / found.clamp(min=least).sqrt()


@one_thread()
def fill_mixed(routed: Tensor, weight: Tensor, *tensors: Tensor, scale: float, offset: float) -> None:
    """`Ops.mix_streams`; `tensors` are outputs, streams and inputs. Mutates: the outputs."""
    count = routed.shape[1]
    outputs, streams, inputs = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    is_same = all(one.data_ptr() == other.data_ptr() for one, other in zip(streams, inputs, strict=False))
    for rows in _stretches(routed):
        coefficients = torch.split(_coefficients(routed[rows] * scale, weight).add_(offset), len(inputs), dim=1)
        read = [part[rows].float() for part in inputs]
        wide = read if is_same and len(read) == count else [stream[rows].float() for stream in streams]
        total, term = torch.empty_like(wide[0]), torch.empty_like(wide[0])
        for out, stream, of_stream in zip(outputs, wide, coefficients, strict=True):
            total.copy_(stream)
            for part, coefficient in zip(read, torch.split(of_stream, 1, dim=1), strict=True):
                total.add_(torch.mul(part, coefficient, out=term))
            out[rows] = total


def _coefficients(routed: Tensor, weight: Tensor) -> Tensor:
    """tanh(routed) @ weight.T, one term after the other. Shapes: routed [T, S], weight [N, S] -> [T, N]."""
    room = routed.new_zeros(routed.shape[0], round_up(routed.shape[1], VECTOR))
    room[:, : routed.shape[1]] = routed
    bent = room.tanh_()
    total = bent[:, :1] * weight[:, 0]
    for index in range(1, weight.shape[1]):
        total = total + bent[:, index : index + 1] * weight[:, index]
    return total


@one_thread()
def statistical_top_k(x: Tensor, size: int, cutoff: float) -> None:
    """See `Ops.statistical_top_k`."""
    for rows in _stretches(x):
        gates = x[rows, :size]
        wide = gates.to(torch.float32, copy=True)
        wide.sub_(_mean(wide))
        deviation = _mean(wide.square()).sqrt_()
        gates.copy_(wide.sub_(deviation.mul_(cutoff)).clamp_(min=0.0))


def _stretches(x: Tensor) -> Iterator[slice]:
    """A few rows at a time, whose temporaries stay in the cache; all at once on a device."""
    step = ROWS_AT_A_TIME if x.device.type == "cpu" else max(1, x.shape[0])
    return (slice(begin, begin + step) for begin in range(0, x.shape[0], step))


def _mean(x: Tensor) -> Tensor:
    """Of each row. Shapes: [T, N] -> [T, 1]."""
    size = 1 << (x.shape[1] - 1).bit_length()
    total = x
    if size != x.shape[1]:
        total = x.new_zeros(x.shape[0], size)
        total[:, : x.shape[1]] = x
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total / x.shape[1]
