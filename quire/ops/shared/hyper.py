"""Hyper-connections in plain torch, the reference: how layers read and write several hidden states of each token.

Row invariance: as in `streams`; sums over streams are added one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.ops.contracts.operands import HyperWeights
from quire.ops.shared.compressed import exponentials, in_order, row_sums
from quire.ops.shared.elementwise import VECTOR
from quire.ops.threads import one_thread
from quire.utils.math import round_up

ROWS_AT_A_TIME = 32
"""Tokens whose streams are widened to float32 at a time."""


def read_streams(streams: Tensor, products: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor]:
    """See `Ops.read_streams`."""
    read = streams.new_empty(streams.shape[0], streams.shape[1] // weights.count)
    writing = torch.empty(streams.shape[0], weights.num_written)
    fill_read(read, writing, streams, products, weights=weights)
    return read, writing


def sum_streams(streams: Tensor, products: Tensor, weights: HyperWeights) -> Tensor:
    """See `Ops.sum_streams`."""
    read = streams.new_empty(streams.shape[0], streams.shape[1] // weights.count)
    fill_read(read, None, streams, products, weights=weights)
    return read


def write_streams(streams: Tensor, out: Tensor, writing: Tensor) -> Tensor:
    """See `Ops.write_streams`."""
    written = torch.empty_like(streams)
    fill_written(written, streams, out, writing)
    return written


@one_thread()
def fill_read(
    read: Tensor, writing: Tensor | None, streams: Tensor, products: Tensor, *, weights: HyperWeights
) -> None:
    """`Ops.read_streams`, and `sum_streams` without `writing`. Mutates: read [T, E], writing."""
    count = weights.count
    for rows in stretches(streams):
        wide = streams[rows].float()
        rms = (row_sums(wide.square()) / wide.shape[1] + weights.norm_eps).sqrt_()
        numbers = products[rows] / rms * weights.scale + weights.base
        opened = sigmoids(numbers[:, : 2 * count])
        total = opened[:, :1].add(weights.eps) * wide[:, : read.shape[1]]
        for index, stream in enumerate(torch.split(wide, read.shape[1], dim=1)):
            if index:
                total.add_(opened[:, index : index + 1].add(weights.eps) * stream)
        read[rows] = total.to(read.dtype)
        if writing is not None:
            writing[rows, :count] = opened[:, count:].mul_(weights.magnitude).add_(weights.least_added)
        if writing is not None and weights.iterations:
            writing[rows, count:] = _balanced(numbers[:, 2 * count :], weights).flatten(1)


def sigmoids(x: Tensor) -> Tensor:
    """In stretches of whole vectors for each row. Shapes: [T, N] -> [T, N]."""
    room = x.new_zeros(x.shape[0], round_up(x.shape[1], VECTOR))
    room[:, : x.shape[1]] = x
    return room.sigmoid_()[:, : x.shape[1]]


def _balanced(numbers: Tensor, weights: HyperWeights) -> Tensor:
    """The matrices whose rows and columns add up to one. Shapes: [T, S * S] -> [T, S, S]."""
    matrix = numbers.view(-1, weights.count, weights.count)
    matrix = exponentials(matrix - matrix.amax(dim=2, keepdim=True))
    matrix = matrix / _of_rows(matrix) + weights.eps
    matrix = matrix / (_of_columns(matrix) + weights.eps)
    for _ in range(weights.iterations - 1):
        matrix = matrix / (_of_rows(matrix) + weights.eps)
        matrix = matrix / (_of_columns(matrix) + weights.eps)
    return matrix


def _of_rows(matrix: Tensor) -> Tensor:
    """Sums. Shapes: [T, S, S] -> [T, S, 1]."""
    return in_order(matrix.transpose(1, 2)).unsqueeze(2)


def _of_columns(matrix: Tensor) -> Tensor:
    """Sums. Shapes: [T, S, S] -> [T, 1, S]."""
    return in_order(matrix).unsqueeze(1)


@one_thread()
def fill_written(written: Tensor, streams: Tensor, out: Tensor, writing: Tensor) -> None:
    """`Ops.write_streams`. Mutates: written [T, S * E]."""
    size = out.shape[1]
    count = streams.shape[1] // size
    has_matrix = writing.shape[1] > count
    for rows in stretches(streams):
        wide, added = torch.split(streams[rows].float(), size, dim=1), out[rows].float()
        numbers = writing[rows]
        for stream in range(count):
            total = numbers[:, stream : stream + 1] * added
            if not has_matrix:
                total.add_(wide[stream])
            for source in range(count if has_matrix else 0):
                place = count * (1 + source) + stream
                total.add_(numbers[:, place : place + 1] * wide[source])
            written[rows, stream * size : (stream + 1) * size] = total.to(written.dtype)


def stretches(x: Tensor) -> Iterator[slice]:
    """A few rows at a time."""
    return (slice(begin, begin + ROWS_AT_A_TIME) for begin in range(0, x.shape[0], ROWS_AT_A_TIME))
