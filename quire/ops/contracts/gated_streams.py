"""Contracts of the ops of streams behind gates, and of embeddings of n-grams; conventions as in `ops`.

More letters: S streams of a token, W inputs of a convolution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quire.ops.contracts.recurrent import RecurrentOps

if TYPE_CHECKING:
    from torch import Tensor

    from quire.ops.contracts.operands import ConvWeights, NGramHashes, StateMetadata


class GatedStreamOps(RecurrentOps):
    """Their ops."""

    def open_streams(self, x: Tensor, gates: Tensor, *, count: int) -> Tensor:
        """The mean over a token's streams of sigmoid(gate) * x, in float32, streams in order.

        Shapes: x, gates [T, S * E] -> [T, E].
        """
        return cast("Tensor", self._table["open_streams"](x, gates, count=count))

    def stream_shares(self, products: Tensor) -> Tensor:
        """How much of what a half of a layer gives is added to each stream: 2 * sigmoid(product / S).

        Shapes: products [T, S] float32 -> [T, S] float32, as `write_streams` takes it.
        """
        return cast("Tensor", self._table["stream_shares"](products))

    def ngram_rows(
        self, token_ids: Tensor, hashes: NGramHashes, states: Tensor, metadata: StateMetadata, *, first: int
    ) -> Tensor:
        """The rows of a table that stand for each token together with those before it.

        An n-gram's hash is the exclusive or of token * multiplier over its tokens, the last of which is the token
        itself. Of the tokens before it those behind an end of text are read as ends, too, and so is what is before a
        sequence. A head's row is the hash modulo its number of rows, behind the rows of the heads before it.
        A state has from number `first` on the last tokens, oldest first, less the number of the end.
        Shapes: token_ids [T] int64, states as for `mamba` -> [T, heads] int64.
        Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["ngram_rows"](token_ids, hashes, states, metadata, first=first))

    def gate_values(self, keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
        """sigmoid(g) * value for each stream, where g = sign(p) * sqrt(max(|p|, 1e-6)) and p = key . query / sqrt(E).

        Sums over E add the second half to the first, again and again.
        Shapes: keys, queries [T, S * E], values [T, E] -> [T, S * E].
        """
        return cast("Tensor", self._table["gate_values"](keys, queries, values))

    def dilated_conv(
        self, x: Tensor, residual: Tensor, weights: ConvWeights, states: Tensor, metadata: StateMetadata, *, step: int
    ) -> Tensor:
        """residual + silu(conv(x)) in float32: a causal convolution of each channel, whose inputs lie `step` apart.

        The state is the last (W - 1) * step inputs, oldest first, at the beginning of a page. Shapes: x, residual
        [T, C], states as for `mamba` -> [T, C]. Mutates: states, at the pages that metadata names to write.
        """
        return cast("Tensor", self._table["dilated_conv"](x, residual, weights, states, metadata, step=step))
