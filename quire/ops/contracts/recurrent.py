"""The contracts of ops of recurrent layers, a part of `ops.Ops`. Its shape letters and conventions hold here."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from quire.ops.backends import Op
    from quire.ops.contracts.operands import (
        ConvolvedQkvWeights,
        ConvWeights,
        GatedDeltaWeights,
        LightningWeights,
        Mamba2Weights,
        MambaWeights,
        RgLruWeights,
        StateMetadata,
    )


class RecurrentOps:
    """Scans over the tokens of sequences, and their states."""

    _table: Mapping[str, Op]

    def mamba(self, projected: Tensor, weights: MambaWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
        """A Mamba layer between its two projections (https://arxiv.org/abs/2312.00752, algorithm 2).

        1. projected is the convolution's input u, and the gate z: x = silu(conv(u)).
        2. derive(x) is the time step in few numbers, and the vectors B and C, normed where there are norms;
           dt = softplus(widen(time step) + time_bias).
        3. Token by token, for each channel c: h[c] = h[c] * exp(dt[c] * decay[c]) + (dt[c] * x[c]) * B, y[c] = h[c] .
           C.
        4. (y + skip * x) * silu(z).
        All of it in float32. The recurrence is evaluated token by token, never in another form, so that the bits of a
        sequence are the same however it is cut into steps. Sums over N add the second half to the first, again and
        again. The state is the last W - 1 inputs of the convolution, oldest first, [W - 1, C], and then h, [C, N].

        Shapes: projected [T, 2C], states [2, B, bytes / 8] float32: the first and the second half of the numbers of
        each page -> [T, C] in projected's dtype. Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["mamba"](projected, weights, states, metadata))

    def mamba2(self, projected: Tensor, weights: Mamba2Weights, states: Tensor, metadata: StateMetadata) -> Tensor:
        """A Mamba 2 layer between its two projections (https://arxiv.org/abs/2405.21060, section 7).

        1. projected is the gate z, the convolution's input u, and a number for each head: silu(conv(u)) is x, B of each
           group, and C of each group; dt = softplus(number + time_bias).
        2. Token by token, for each head: h = h * exp(dt * decay) + (dt * x) B, y = h C.
        3. (y + skip * x) * silu(z), whose channels are RMS-normed group by group, and multiplied by the norm's weight;
           or the norm comes before the gate; or there is none.
        As for `mamba`. The state is the last inputs of the convolution, and then h, [H, D, N].

        Shapes: projected [T, HD + (HD + 2GN) + H], states as for `mamba` -> [T, HD] in projected's dtype.
        Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["mamba2"](projected, weights, states, metadata))

    def short_conv(self, projected: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
        """c * conv(b * x) in float32: a gated convolution; projected is b, c and x.

        The state is the last W - 1 of b * x. Shapes: projected [T, 3C], states as for `mamba` -> [T, C] in projected's
        dtype. Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["short_conv"](projected, weights, states, metadata))

    def gated_delta(
        self,
        projected: Tensor,
        weights: GatedDeltaWeights,
        states: Tensor,
        metadata: StateMetadata,
        *,
        gates: Tensor | None = None,
        times: Tensor | None = None,
    ) -> Tensor:
        """The gated delta rule between a layer's two products (https://arxiv.org/abs/2412.06464, equation 10).

        1. projected is the convolution's input u, the gate z, and two numbers for each head, b and a. silu(conv(u)) is
           the query and the key of each key head, and the value v of each head. Head h has the query q and the key k of
           key head h // (H / K): each is divided by sqrt(its sum of squares + 1e-6), and q also by sqrt(N).
        2. dt = softplus(a + time_bias), rate = most_rate * sigmoid(b). Token by token, for each head:
           h = h * exp(dt * decay), h = h + rate * (v - h k) k, y = h q.
        3. Each head's y is RMS-normed, and multiplied by the norm's weight and silu(z), or sigmoid(z).
        As for `mamba`. The state is the last inputs of the convolution, and then h, [H, D, N].

        Where `time_bias` is [H, N], a has a number for each channel of a key, and so has dt: Kimi Delta Attention
        (https://arxiv.org/abs/2510.26692, equation 1). Then z and a may be given beside projected, as gates and times,
        and projected is u and b. With a bound, exp(bound * sigmoid((a + time_bias) * -decay)) takes the place of
        exp(dt * decay).

        Shapes: projected [T, (2KN + HD) + HD + H + H or HN], or [T, (2KN + HD) + H] with gates [T, HD] and times
        [T, HN] of its dtype; states as for `mamba` -> [T, HD] in projected's dtype.
        Mutates: states, at the pages that metadata names to write.
        """
        run = self._table["gated_delta"]
        return cast("Tensor", run(projected, weights, states, metadata, gates=gates, times=times))

    def lightning_attention(
        self, projected: Tensor, weights: LightningWeights, states: Tensor, metadata: StateMetadata
    ) -> Tensor:
        """Linear attention with a decay for each head (https://arxiv.org/abs/2401.04658) between two products.

        1. projected is u and the gate z: silu(u) is, head by head, the query q, the key k and the value v.
        2. Token by token, for each head: h = h * decay + v k, y = h q.
        3. All heads' y together are RMS-normed, and multiplied by the norm's weight and sigmoid(z).
        As for `mamba`. The state is h, [H, D, D].

        Shapes: projected [T, 3HD + HD], states as for `mamba` -> [T, HD] in projected's dtype.
        Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["lightning_attention"](projected, weights, states, metadata))

    def rg_lru(self, x: Tensor, gate: Tensor, weights: RgLruWeights, states: Tensor, metadata: StateMetadata) -> Tensor:
        """A real-gated linear recurrent unit (https://arxiv.org/abs/2402.19427, section 2.4), times a gate.

        1. u = conv(x). In each block of channels, r = sigmoid of the second half of gates(u), i = that of the first.
        2. a = exp(r * decay). Token by token, for each channel: h = a * h + sqrt(1 - a^2) * i * u. A sequence's first
           token has no root: h = i * u.
        3. h * gate.
        As for `mamba`. The state is the last inputs of the convolution, and then h, [C].

        Shapes: x, gate [T, C], states as for `mamba` -> [T, C] in x's dtype.
        Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["rg_lru"](x, gate, weights, states, metadata))

    def convolved_qkv(
        self, projected: Tensor, weights: ConvolvedQkvWeights, states: Tensor, metadata: StateMetadata
    ) -> Tensor:
        """Queries, keys and values of compressed convolutional attention (https://arxiv.org/abs/2510.04476).

        1. projected is queries and keys, and two halves of values. u = single(queries and keys), rounded, of the token
           and those before it, which may be none; joint(u) of each head, and a head's bias.
        2. Of each query head, half the sum of its query and its key in projected is added, and the mean of these sums
           over the query heads of a key to that key.
        3. Heads are divided by their length, at least 2^-23, and multiplied by sqrt(D); keys also by their temperature.
        4. The late half of the values is that of the token before; product_bias, or zeros, for the first of a sequence.
        As for `mamba`. The state is the last queries and keys of projected, and then the late half of the last token.

        Shapes: projected [T, (H + K) * D + K * D], states as for `mamba` -> [T, (H + 2K) * D] in projected's dtype.
        Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["convolved_qkv"](projected, weights, states, metadata))

    def allocate_states(self, *, num_blocks: int, num_bytes: int) -> Tensor:
        """Uninitialised states of one recurrent layer, of so many bytes a page. Shapes: -> [2, B, bytes / 8] float32.

        The first and the second half of a page lie apart, as the keys and values of a block do. Memory is committed
        when first written.
        """
        return cast("Tensor", self._table["allocate_states"](num_blocks=num_blocks, num_bytes=num_bytes))
