"""Contracts of the ops that choose what attention sees, and attend to it; conventions as in `ops`.

More letters: I features of an indexer's key, N tokens or blocks that are chosen at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quire.ops.contracts.compressed import CompressedOps

if TYPE_CHECKING:
    from torch import Tensor

    from quire.ops.contracts.operands import AttentionMetadata, RowCache


class SelectionOps(CompressedOps):
    """Their ops."""

    def select_tokens(
        self,
        query: Tensor,
        weights: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        num_selected: int,
        head_size: int,
    ) -> Tensor:
        """The positions that each of this step's tokens attends to, in ascending order; -1 behind the last.

        A token at position p that sees no more than `num_selected` positions, 0 .. p, attends to all of them. Otherwise
        to those of the highest scores, the earlier position first where two are equal. The score of a position is the
        sum over the heads, in float32 and in their order, of weight * max(query . key, 0), the key being the last I
        features of the one that the cache has of the position, whose size is `head_size`.
        Shapes: query [T, H, I], weights [T, H] float32, kv_cache as allocated, of one kv head -> [T, num_selected]
        int32.
        """
        return cast(
            "Tensor",
            self._table["select_tokens"](
                query, weights, kv_cache, metadata, num_selected=num_selected, head_size=head_size
            ),
        )

    def select_blocks(
        self, query: Tensor, keys: RowCache, *, block_size: int, num_selected: int, num_local: int
    ) -> Tensor:
        """The blocks of `block_size` tokens that each of this step's tokens attends to, in ascending order; -1 behind
        the last. Each head chooses by itself.

        A token at position p sees blocks 0 .. p // block_size, the last of them up to itself. Of these it attends to
        the last `num_local`, and beside them to those of the highest scores, the earlier block first where two are
        equal, `num_selected` together at most. The score of a block is the largest query . key, in float32, of the
        positions in it that the token sees; a row of `keys` is the key of a position.
        Shapes: query [T, K, I] -> [T, K, num_selected] int32.
        """
        return cast(
            "Tensor",
            self._table["select_blocks"](
                query, keys, block_size=block_size, num_selected=num_selected, num_local=num_local
            ),
        )

    def tokens_of_entries(self, selected: Tensor, positions: Tensor, *, rate: int) -> Tensor:
        """The positions of the tokens of chosen entries, of `rate` tokens each, and of the tokens behind the last whole
        entry that the token sees, itself the last of them; ascending, -1 behind the last.

        Shapes: selected [T, C] int32, as `select_entries` gives it, positions [T] int64 ->
        [T, C * rate + rate - 1] int32.
        """
        return cast("Tensor", self._table["tokens_of_entries"](selected, positions, rate=rate))

    def selected_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        selected: Tensor,
        *,
        scale: float,
        run: int = 1,
        sinks: Tensor | None = None,
        ends_early: bool = False,
    ) -> Tensor:
        """`paged_attention` over the positions that were chosen for each token and kv head, as if there were no others.

        A number n in `selected` stands for positions n * run .. (n + 1) * run - 1, as far as the token sees them; -1
        for none. Numbers ascend. Each token has at least one, and all that it sees where these are no more than N; so
        where they are all, the bits are those of `paged_attention`. Other tokens have N, or fewer where `ends_early`.
        Shapes: query [T, H, D], kv_cache as allocated -> [T, H * D]. selected: [T, N] int32, the same for all kv heads,
        where `run` is 1; or [T, K, N], where a run is whole blocks of the cache. sinks [H] float32, as there.
        """
        return cast(
            "Tensor",
            self._table["selected_attention"](
                query, kv_cache, metadata, selected, scale=scale, run=run, sinks=sinks, ends_early=ends_early
            ),
        )
