"""Embeddings of a token together with those before it, added to all streams of the token (Qwen4-Exp's per-layer
embeddings).

What came before a step is in the layer's state: the last inputs of the convolution, and the last tokens.
"""

from __future__ import annotations

from itertools import accumulate, count, takewhile

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.recurrent_mixers import NGramSpec
from quire.errors import CheckpointError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import StreamNorm
from quire.layers.recurrent.scanned import conv_weights
from quire.ops.contracts.operands import NGramHashes

TABLE = "ngram_embedding"


class NGrams:
    """streams + values + convolution: see `Ops.ngram_rows`, `gate_values` and `dilated_conv`."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.mixers[index]
        assert isinstance(spec, NGramSpec)
        self.ops, self.spec, self.cache = ctx.ops, spec, arch.caches_of(index)[0]
        embedding = ctx.child("ple_embedding")
        self.hashes, self.table = _hashes(spec, embedding), _table(spec, embedding)
        self.keys = Linear(ctx.child("key_proj"), spec.embedding_size, spec.inner_size)
        self.values = Linear(ctx.child("value_proj"), spec.embedding_size, spec.stream_size)
        self.key_norm, self.query_norm, self.conv_norm = (
            StreamNorm(ctx.child(name), spec.num_streams, spec.stream_size, arch.norm_eps, offset=arch.norms.offset)
            for name in ("norm_key", "norm_query", "norm_conv")
        )
        self.conv = conv_weights(ctx.child("conv1d"), spec.inner_size, spec.conv_width, has_bias=False)

    def __call__(self, streams: Tensor, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: streams [T, S * E], token_ids [T] -> [T, S * E]. Mutates: this layer's states."""
        return self.ops.scale_add(self._convolved(self._values(streams, token_ids, ctx), ctx), 1.0, streams)

    def _values(self, streams: Tensor, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Of each stream. Shapes: -> [T, S * E]."""
        embedded = self._embedded(token_ids, ctx)
        keys = self.key_norm(self.keys(embedded))
        return self.ops.gate_values(keys, self.query_norm(streams), self.values(embedded))

    def _embedded(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: -> [T, heads * D]."""
        spec, states, metadata = self.spec, ctx.kv_caches[self.cache], ctx.state_of(self.cache)
        first = spec.num_past * spec.conv_channels
        rows = self.ops.ngram_rows(token_ids, self.hashes, states, metadata, first=first)
        return self.ops.embedding(rows.flatten(), self.table).view(-1, spec.embedding_size)

    def _convolved(self, values: Tensor, ctx: ForwardContext) -> Tensor:
        """With the values themselves. Shapes: values [T, S * E] -> [T, S * E]."""
        states, metadata = ctx.kv_caches[self.cache], ctx.state_of(self.cache)
        return self.ops.dilated_conv(
            self.conv_norm(values), values, self.conv, states, metadata, step=self.spec.longest
        )


def _hashes(spec: NGramSpec, ctx: LayerContext) -> NGramHashes:
    """As the checkpoint has them, or else as config.json says.

    Raises: CheckpointError for rows that the table lacks.
    """
    firsts = tuple(accumulate(spec.head_rows, initial=0))[:-1]
    multipliers, rows, begins = (
        ctx.integers(name, (len(numbers),), dtype=torch.int64)
        if ctx.header(name) is not None
        else torch.tensor(numbers, device=ctx.ops.device)
        for name, numbers in (
            ("layer_multipliers", spec.multipliers),
            ("ngram_heads_vocab_sizes", spec.head_rows),
            ("ngram_heads_offsets", firsts),
        )
    )
    is_read = not (rows.is_meta or begins.is_meta)
    if is_read and (rows.min() < 1 or begins.min() < 0 or (begins + rows).max() > spec.num_rows):
        raise CheckpointError(
            f"{ctx.name}: heads of n-grams have rows up to {int((begins + rows).max())}, but the table has "
            f"{spec.num_rows}; weights or config.json belong to another model"
        )
    return NGramHashes(end_id=spec.end_id, multipliers=multipliers, rows=rows, firsts=begins)


def _table(spec: NGramSpec, ctx: LayerContext) -> Tensor:
    """One tensor, in which a checkpoint may have the rows, or those of several behind each other."""
    parts = takewhile(lambda name: ctx.header(name) is not None, (f"{TABLE}.shard_{n}.weight" for n in count()))
    return ctx.joined_table(list(parts) or [f"{TABLE}.weight"], (spec.num_rows, spec.head_size))
