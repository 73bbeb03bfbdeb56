"""Recurrent layers over the products of an implementation: convolution, scan, gate and norm.

Row invariance: products, sums, quotients and square roots of single numbers are exact to the last bit wherever torch
computes them, and sums are written out in a fixed order. For exp, SiLU and softplus, whose bits depend on where an
element lies in a stretch, rows lie apart (`rows_apart`), so that torch computes each row by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from quire.config.memory.activations.scratch import STATES_AT_ONCE
from quire.ops.contracts.operands import ConvWeights, Mamba2Weights, MambaWeights, StateMetadata
from quire.utils.math import cdiv, round_up

VECTOR = 32
"""Elements that torch's elementwise loops take at a time, at most."""
EXP, SILU, SOFTPLUS = torch.ops.aten.exp.out, torch.ops.aten.silu.out, torch.ops.aten.softplus.out


def mamba(
    projected: Tensor,
    weights: MambaWeights,
    states: Tensor,
    metadata: StateMetadata,
    *,
    linear: Callable[..., Tensor],
) -> Tensor:
    """`Ops.mamba` in float32, with an implementation's products."""
    channels, state_size = weights.decay.shape
    rank = weights.widen.in_features
    step = Step.of(metadata)
    x = apart(SILU, convolve(projected[:, :channels].float(), weights.conv, states, step))
    derived = linear(x.to(projected.dtype).contiguous(), weights.derive, out_dtype=torch.float32)
    parts = list(derived.split_with_sizes((rank, state_size, state_size), dim=1))
    if weights.norms is not None:
        scales = weights.norms
        parts = [rms(part, scale, weights.norm_eps) for part, scale in zip(parts, scales, strict=True)]
    time, write, read = parts
    wide = linear(time.contiguous().to(projected.dtype), weights.widen, out_dtype=torch.float32)
    dt = apart(SOFTPLUS, wide.add_(weights.time_bias))

    def decay(tokens: Tensor) -> Tensor:
        """[n, 1, C, 1, N]"""
        exponents = dt[tokens].unsqueeze(2) * weights.decay
        return apart(EXP, exponents.flatten(1)).view(-1, 1, channels, 1, state_size)

    y = _scan(
        (dt * x).view(-1, 1, channels, 1),
        decay,
        write.unsqueeze(1),
        read.unsqueeze(1),
        states,
        step,
        first=weights.conv.num_inputs,
    )
    y = y.view(-1, channels).add_(x * weights.skip)
    return y.mul_(apart(SILU, projected[:, channels:].float()))


def mamba2(projected: Tensor, weights: Mamba2Weights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """`Ops.mamba2` in float32."""
    heads, groups, state_size = weights.decay.shape[0], weights.num_groups, weights.state_size
    inner = weights.inner_size
    gate, convolved, time = projected.float().split_with_sizes((inner, inner + 2 * groups * state_size, heads), dim=1)
    step = Step.of(metadata)
    out = apart(SILU, convolve(convolved, weights.conv, states, step))
    x, write, read = out.split_with_sizes((inner, groups * state_size, groups * state_size), dim=1)
    dt = apart(SOFTPLUS, time + weights.time_bias)
    decays = apart(EXP, dt * weights.decay).contiguous().view(-1, groups, heads // groups, 1, 1)
    by_head = x.reshape(-1, groups, heads // groups, inner // heads)
    y = _scan(
        by_head * dt.reshape(-1, groups, heads // groups, 1),
        lambda tokens: decays[tokens],
        write.reshape(-1, groups, state_size),
        read.reshape(-1, groups, state_size),
        states,
        step,
        first=weights.conv.num_inputs,
    )
    y.add_(by_head * weights.skip.view(groups, heads // groups, 1))
    opened, y = apart(SILU, gate), y.view(-1, inner)
    if weights.norms_before_gate:
        return _group_norm(y, weights).mul_(opened)
    return _group_norm(y.mul_(opened), weights)


def _group_norm(x: Tensor, weights: Mamba2Weights) -> Tensor:
    """Shapes: [T, HD] -> [T, HD]."""
    if weights.norm is None:
        return x
    grouped = x.view(x.shape[0], weights.num_groups, -1)
    return rms(grouped, None, weights.norm_eps).view(x.shape).mul_(weights.norm)


def short_conv(projected: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
    """`Ops.short_conv` in float32."""
    write, read, x = projected.float().chunk(3, dim=1)
    return convolve(write * x, weights, states, Step.of(metadata)).mul_(read)


@dataclass(frozen=True, slots=True)
class Step:
    """The sequences of a step."""

    starts: list[int]
    """The first token of each."""
    counts: list[int]
    """Tokens of each."""
    reads: list[int]
    writes: list[int]

    @classmethod
    def of(cls, metadata: StateMetadata) -> Step:
        """As the host reads it."""
        starts: list[int] = metadata.query_start.tolist()
        counts = [end - start for start, end in pairwise(starts)]
        return cls(starts[:-1], counts, metadata.reads.tolist(), metadata.writes.tolist())

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(self.counts)


def rows_apart(num_rows: int, width: int) -> Tensor:
    """Memory for rows that do not touch, each of them aligned. Shapes: -> [num_rows, width] float32."""
    return torch.empty(num_rows, round_up(width, VECTOR) + VECTOR)[:, :width]


def apart(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A function of each element, row by row. Shapes: x [T, N] -> [T, N]."""
    rows = rows_apart(*x.shape).copy_(x)
    return function(rows, out=rows)


def rms(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension."""
    mean = fold_sum(x * x).div_(x.shape[-1]).add_(eps).sqrt_().unsqueeze(-1)
    normed = x / mean
    return normed if scale is None else normed.mul_(scale)


def fold_sum(x: Tensor) -> Tensor:
    """Over the last dimension: the second half is added to the first, again and again. Shapes: [..., N] -> [...]."""
    while x.shape[-1] > 1:
        size = x.shape[-1]
        half = cdiv(size, 2)
        folded = x[..., :half].clone()
        folded[..., : size - half] += x[..., half:]
        x = folded
    return x.squeeze(-1)


def _columns(states: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """The numbers [first, first + count) of all pages, as far as they lie in either half. Shapes: -> [B, n], [B, m]."""
    half = states.shape[2]
    end = first + count
    return states[0, :, min(first, half) : min(end, half)], states[1, :, max(0, first - half) : max(0, end - half)]


def read_states(states: Tensor, pages: list[int], first: int, count: int) -> Tensor:
    """Those numbers of some pages, zeros for page -1. Shapes: -> [R, count]."""
    places = torch.tensor(pages)
    found = torch.cat([part[places.clamp(min=0)] for part in _columns(states, first, count)], dim=1)
    found[places < 0] = 0.0
    return found


def write_states(states: Tensor, pages: list[int], first: int, values: Tensor) -> None:
    """Shapes: values [R, count]."""
    low, high = _columns(states, first, values.shape[1])
    places = torch.tensor(pages)
    low[places] = values[:, : low.shape[1]]
    high[places] = values[:, low.shape[1] :]


class Trail:
    """Rows of a step's tokens, and those of the last tokens before it, which a state has, oldest first."""

    def __init__(
        self, x: Tensor, states: Tensor, step: Step, num_past: int, *, first: int = 0, missing: Tensor | None = None
    ) -> None:
        """The rows in a state begin at its number `first`; `missing` [C], or zeros, are those of tokens before a
        sequence's first. Shapes: x [T, C].
        """
        self._step, self._num_past, self._first = step, num_past, first
        past = read_states(states, step.reads, first, num_past * x.shape[1]).view(-1, x.shape[1])
        if missing is not None:
            past[torch.tensor(step.reads).repeat_interleave(num_past) < 0] = missing
        self._rows = torch.cat((x, past))
        self._starts = torch.tensor(step.starts)
        self._seq = torch.repeat_interleave(torch.arange(len(step.counts)), torch.tensor(step.counts))
        self._local = torch.arange(step.num_tokens) - self._starts[self._seq]

    def before(self, lag: int) -> Tensor:
        """The row of the token so many before each. Shapes: -> [T, C]."""
        return self._rows[self._place(self._seq, self._local - lag)]

    def keep(self, states: Tensor) -> None:
        """Write the last rows of each sequence. Mutates: states."""
        if not self._num_past:
            return
        counts = self._step.counts
        every = torch.arange(len(counts)).repeat_interleave(self._num_past)
        last = (torch.tensor(counts).unsqueeze(1) + torch.arange(-self._num_past, 0)).flatten()
        kept = self._rows[self._place(every, last)].view(len(counts), -1)
        write_states(states, self._step.writes, self._first, kept)

    def _place(self, seq: Tensor, local: Tensor) -> Tensor:
        """Where a token's row is that many behind a sequence's first of this step."""
        before = self._step.num_tokens + seq * self._num_past + self._num_past + local
        return torch.where(local >= 0, self._starts[seq] + local, before)


def convolve(x: Tensor, weights: ConvWeights, states: Tensor, step: Step) -> Tensor:
    """The causal convolution; its last inputs go into the states. Shapes: x [T, C] -> [T, C]."""
    trail = Trail(x, states, step, weights.weight.shape[1] - 1)
    out = convolved(trail, weights, step.num_tokens)
    trail.keep(states)
    return out


def convolved(trail: Trail, weights: ConvWeights, num_tokens: int, *, lag: int = 0) -> Tensor:
    """What the convolution gives for the tokens so many before those of the step. Shapes: -> [T, C]."""
    channels, width = weights.weight.shape
    out = torch.zeros(num_tokens, channels) if weights.bias is None else weights.bias.repeat(num_tokens, 1)
    for place in range(width):
        out += trail.before(lag + width - 1 - place) * weights.weight[:, place]
    return out


def _scan(
    x: Tensor,
    decay: Callable[[Tensor], Tensor],
    write: Tensor,
    read: Tensor,
    states: Tensor,
    step: Step,
    *,
    first: int,
) -> Tensor:
    """h = h * decay + x write, y = h . read, token by token. h begins at number `first` of a state.

    M heads of P channels in each of G groups. Shapes: x [T, G, M, P], decay: tokens [n] -> what multiplies
    [n, G, M, P, N], write and read [T, G, N] -> [T, G, M, P].
    """
    out = torch.empty_like(x)

    def update(state: Tensor, tokens: Tensor) -> Tensor:
        state.mul_(decay(tokens)).add_(x[tokens].unsqueeze(-1) * write[tokens][:, :, None, None])
        return fold_sum(state * read[tokens][:, :, None, None])

    token_by_token(update, out, states, step, first=first, shape=(*x.shape[1:], write.shape[-1]))
    return out


def token_by_token(
    update: Callable[[Tensor, Tensor], Tensor],
    out: Tensor,
    states: Tensor,
    step: Step,
    *,
    first: int,
    shape: tuple[int, ...],
) -> None:
    """Take each sequence's state through its tokens, and write the state behind the last. Mutates: out, states.

    `update` gets states [n, *shape] and one token [n] of each of as many sequences; it changes the states and gives the
    tokens' outputs. A state begins at number `first` of a page. Shapes: out [T, ...].
    """
    size = math.prod(shape)
    at_once = max(1, STATES_AT_ONCE // (4 * size))
    longest_first = sorted(range(len(step.counts)), key=lambda seq: -step.counts[seq])
    for begin in range(0, len(longest_first), at_once):
        seqs = longest_first[begin : begin + at_once]
        state = read_states(states, [step.reads[seq] for seq in seqs], first, size).view(-1, *shape)
        starts, counts = torch.tensor([step.starts[seq] for seq in seqs]), [step.counts[seq] for seq in seqs]
        num_active = len(seqs)
        for index in range(counts[0]):
            while counts[num_active - 1] <= index:
                num_active -= 1
            tokens = starts[:num_active] + index
            out[tokens] = update(state[:num_active], tokens)
        write_states(states, [step.writes[seq] for seq in seqs], first, state.flatten(1))
