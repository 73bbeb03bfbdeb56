"""What chooses the blocks of tokens that all heads attend to, by the means of the blocks' keys (Qwen4-Exp).

An entry stands for each whole block: the mean of its tokens' keys, behind a norm, rotated as the block's first token.
Entries are those of compressed attention whose gates are all zero. These rotate pairs of neighbours at the end of a
head, other than a checkpoint, so the weights are read in that order: a score is the same in any order of features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.mixers import AttentionSpec
from quire.layers.context import LayerContext, refuse_elsewhere
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rotary_table
from quire.ops.contracts.operands import CompressorWeights, RowCache

PRODUCT = "index_qk_proj.weight"


class MeanIndexer:
    """Scores the whole blocks that each token sees, and gives the tokens that it attends to."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        mixer = arch.mixers[index]
        assert isinstance(mixer, AttentionSpec)
        assert mixer.means is not None
        assert mixer.rope is not None
        refuse_elsewhere(arch, ctx, "attention to blocks that an indexer chooses by their means")
        spec, self.ops = mixer.means, ctx.ops
        self.spec, self.size = spec, spec.head_size
        _, self.tail, self.entries = arch.caches_of(index)
        order = _rotated_last(self.size, mixer.rope.rotary_dim)
        self.query, self.key = self._read_products(arch, ctx, order)
        self.query_norm, self.key_norm = (
            RMSNorm(ctx.child(name), self.size, arch.norm_eps, offset=arch.norms.offset)
            for name in ("q_layernorm", "k_layernorm")
        )
        if not self.query_norm.weight.is_meta:
            self.query_norm.weight = self.query_norm.weight[order].contiguous()
            self.key_norm.weight = self.key_norm.weight[order].contiguous()
        self.cos_sin = rotary_table(mixer.rope, ctx.max_model_len, ctx.ops.device)
        self.weights = CompressorWeights(
            rate=spec.rate,
            reach=spec.rate,
            bias=torch.zeros(spec.rate, self.size, device=ctx.ops.device),
            norms=(self.key_norm.weight,),
            eps=arch.norm_eps,
        )

    def select(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """See `Ops.tokens_of_entries`. Shapes: hidden [T, E] -> [T, N] int32. Mutates: the caches of keys."""
        spec, entries = self.spec, self._write_entries(hidden, ctx)
        query = self.query_norm(self.query(hidden).view(-1, self.size)).view(-1, spec.num_heads, self.size)
        self.ops.rotate_last(query, ctx.positions, self.cos_sin)
        selected = self.ops.select_entries(query, None, entries, rate=spec.rate, num_selected=spec.num_selected)
        return self.ops.tokens_of_entries(selected, ctx.positions, rate=spec.rate)

    def _write_entries(self, hidden: Tensor, ctx: ForwardContext) -> RowCache:
        tail, entries = _rows(ctx, self.tail, 2 * self.size), _rows(ctx, self.entries, self.size)
        slots = ctx.groups[ctx.group_of_layer[self.tail]].slot_mapping
        self.ops.store_rows(self.key(hidden), tail.rows, slots)
        self.ops.compress(tail, entries, self.weights, self.cos_sin)
        return entries

    def _read_products(self, arch: ModelArch, ctx: LayerContext, order: Tensor) -> tuple[Linear, Linear]:
        """To the queries of all heads; and to a key, with gates of zero behind it."""
        heads, size = self.spec.num_heads, self.size
        stored = ctx.read(PRODUCT, ((heads + 1) * size, arch.hidden_size))
        num_rows, gates = heads * size, torch.zeros(size, arch.hidden_size, device="meta" if stored.is_meta else "cpu")
        if stored.is_meta:
            query, key = stored[:num_rows], stored[num_rows:]
        else:
            places = (torch.arange(heads + 1).unsqueeze(1) * size + order).flatten()
            query, key = stored[places[:num_rows]], stored[places[num_rows:]]
        products = ctx.packed([], [query]), ctx.packed([PRODUCT], [key, gates])
        return Linear.of(ctx.ops, products[0]), Linear.of(ctx.ops, products[1])


def _rotated_last(size: int, rotary_dim: int) -> Tensor:
    """The places of features, those that do not rotate first, then each of one half beside its own of the other."""
    pairs = torch.arange(rotary_dim).view(2, -1).t().flatten()
    return torch.cat((torch.arange(rotary_dim, size), pairs))


def _rows(ctx: ForwardContext, cache: int, size: int) -> RowCache:
    return RowCache(rows=ctx.kv_caches[cache], size=size, metadata=ctx.groups[ctx.group_of_layer[cache]].attention)
