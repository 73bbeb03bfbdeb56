"""Contracts of the ops of compressed attention and of hyper-connections; conventions as in `ops`.

More letters: W tokens of a window, C entries that stand for tokens each, Y rows of a cache in a block, I features of an
indexer's key, S streams of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quire.ops.contracts.gated_streams import GatedStreamOps

if TYPE_CHECKING:
    from torch import Tensor

    from quire.ops.contracts.operands import CompressorWeights, HyperWeights, RowCache


class CompressedOps(GatedStreamOps):
    """Their ops.

    The caches of compressed attention are rows: [2, B, 1, Y, X], one row [2 * X] in two halves.
    """

    def rotate_last(self, x: Tensor, positions: Tensor, cos_sin: Tensor, *, backward: bool = False) -> None:
        """Rotate the last features of each head, pairs of neighbours, by the position; the other way round `backward`.

        Shapes: x [T, H, D], positions [T] int64, cos_sin [P, R] float32, R <= D. Mutates: x.
        """
        self._table["rotate_last"](x, positions, cos_sin, backward=backward)

    def store_rows(self, rows: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Write a row for each token; a row may be a feature shorter than the cache's, which is zero there.

        Shapes: rows [T, 2 * X or 2 * X - 1], cache [2, B, 1, Y, X], slots [T] int64: block * Y + row. Mutates: cache.
        """
        self._table["store_rows"](rows, cache, slots)

    def compress(self, tail: RowCache, entries: RowCache, weights: CompressorWeights, cos_sin: Tensor) -> None:
        """Write the entries of whose tokens the last one is among this step's.

        Entry i is of tokens [i * rate, (i + 1) * rate), and of as many before them where entries overlap; none are
        before the first. A token's row in `tail` has products, then gates, of as many features. Each feature is the sum
        over the tokens of product * weight, the weights being the softmax over the tokens of gate + bias, where the
        bias is that of the token's place in its own entry. Of overlapping entries a part's first features are what
        tokens give the entry behind their own, and the others what they give their own.
        Each part of the entry (attention's, and the indexer's) is then normed and rotated as by position i * rate.
        All in float32, rounded once to the cache's dtype.
        Mutates: entries.cache.
        """
        self._table["compress"](tail, entries, weights, cos_sin)

    def select_entries(
        self, query: Tensor, weights: Tensor | None, entries: RowCache, *, rate: int, num_selected: int
    ) -> Tensor:
        """The entries that each of this step's tokens attends to, in ascending order; -1 behind the last.

        A token at position p sees entries 0 .. (p + 1) // rate - 1. Where these are no more than `num_selected` it
        attends to all, otherwise to those of the highest scores, as in `select_tokens`: the last I features of an
        entry are the key; without weights all are 1.
        Shapes: query [T, H, I], weights [T, H] float32 -> [T, num_selected] int32.
        """
        return cast(
            "Tensor",
            self._table["select_entries"](query, weights, entries, rate=rate, num_selected=num_selected),
        )

    def compressed_attention(
        self,
        query: Tensor,
        sinks: Tensor,
        last: RowCache,
        entries: RowCache | None = None,
        selected: Tensor | None = None,
        *,
        scale: float,
        window: int,
        rate: int = 1,
    ) -> Tensor:
        """Attention of this step's tokens over the last `window` tokens, and entries: keys are values, too.

        A token at position p sees positions max(0, p - window + 1) .. p, and the entries that `selected` names, or
        without it all that it may see (`select_entries`). Of an entry the first D features count. Sinks as in
        `paged_attention`.
        Shapes: query [T, H, D], sinks [H] float32, selected [T, N] int32 -> [T, H * D].
        """
        return cast(
            "Tensor",
            self._table["compressed_attention"](
                query, sinks, last, entries, selected, scale=scale, window=window, rate=rate
            ),
        )

    def read_streams(self, streams: Tensor, products: Tensor, weights: HyperWeights) -> tuple[Tensor, Tensor]:
        """What a half of a layer reads of a token's streams, and how it writes them (hyper-connections).

        With m = products / rms(streams) * scale + base, whose scale is one number for each of the three parts:
        read = sigmoid(m[:S]) + eps; added = magnitude * sigmoid(m[S : 2 * S]) + least_added; and the S x S matrix
        softmax(m[2 * S :]) + eps (of rows), whose columns are divided by their sums + eps, then `iterations - 1` times
        its rows and again its columns. Without iterations there is no third part, and no matrix.
        Shapes: streams [T, S * E], products [T, S * (2 + S)] float32, or [T, 2 * S] -> [T, E], the sum of read *
        stream; and [T, S * (1 + S)] float32, or [T, S]: added, and the matrix.
        """
        return cast("tuple[Tensor, Tensor]", self._table["read_streams"](streams, products, weights))

    def sum_streams(self, streams: Tensor, products: Tensor, weights: HyperWeights) -> Tensor:
        """What `read_streams` reads, where nothing is written.

        Shapes: streams [T, S * E], products [T, S] float32 -> [T, E].
        """
        return cast("Tensor", self._table["sum_streams"](streams, products, weights))

    def write_streams(self, streams: Tensor, out: Tensor, writing: Tensor) -> Tensor:
        """added[k] * out + the sum over j of matrix[j, k] * stream j, for each stream k; without a matrix, + stream k.

        `writing`: of `read_streams`.

        Shapes: streams [T, S * E], out [T, E], writing [T, S * (1 + S)] float32, or [T, S] -> [T, S * E].
        """
        return cast("Tensor", self._table["write_streams"](streams, out, writing))
