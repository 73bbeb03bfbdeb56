"""Gemma 3n's text model: streams of hidden states, of which each layer computes one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.layers.streams import StreamsSpec
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.norm import model_norm
from quire.layers.quantization.schemes import DENSE
from quire.models.decoder import DecoderForCausalLM, DecoderLayer
from quire.models.variants.layer_embeddings import LayerEmbedding, LayerEmbeddings

LEAST = 1e-5
"""A stream's mean square counts as no less when it is made as large as another."""


class StreamMixer:
    """Coefficients by which streams are added to each other, routed by one hidden state of each token (AltUp)."""

    def __init__(self, arch: ModelArch, spec: StreamsSpec, ctx: LayerContext) -> None:
        self.ops, self.spec = ctx.ops, spec
        self.router_norm = model_norm(arch, ctx, "router_norm")
        router = replace(ctx.child("modality_router"), scheme=DENSE, dtype=torch.float32)
        self.router = Linear(router, arch.hidden_size, spec.count)
        self.scale = 1.0 / arch.hidden_size
        predicting, correcting = (spec.count**2, spec.count), (spec.count, spec.count)
        self.predicting = ctx.tensor("prediction_coefs.weight", predicting, dtype=torch.float32)
        self.correcting = ctx.tensor("correction_coefs.weight", correcting, dtype=torch.float32)

    def predict(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """What the layer makes of the streams without computing one. Shapes: [T, E] each."""
        routed = self._route(streams[self.spec.active])
        return self.ops.mix_streams(streams, streams, routed, self.predicting, scale=self.scale)

    def correct(self, predicted: Sequence[Tensor], computed: Tensor) -> list[Tensor]:
        """All streams by how far the prediction of one was off. Shapes: [T, E] each."""
        routed = self._route(computed)
        error = self.ops.scale_add(predicted[self.spec.active], -1.0, computed)
        return self.ops.mix_streams(predicted, [error], routed, self.correcting, scale=self.scale, offset=1.0)

    def _route(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [T, E] -> [T, S] float32."""
        normed = self.router_norm(hidden)
        return self.ops.linear(normed, self.router.weight, out_dtype=torch.float32)


class Gemma3nLayer(DecoderLayer):
    """A decoder layer for one stream, between the prediction and the correction of all of them."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        super().__init__(arch, ctx, index)
        spec, size = arch.streams, arch.hidden_size
        assert spec is not None
        self.spec, laurel = spec, ctx.child("laurel")
        self.altup = StreamMixer(arch, spec, ctx.child("altup"))
        self.laurel_left = Linear(laurel.child("linear_left"), size, spec.laurel_rank)
        self.laurel_right = Linear(laurel.child("linear_right"), spec.laurel_rank, size)
        self.laurel_norm = model_norm(arch, laurel, "post_laurel_norm")
        self.active_scale = ctx.tensor("altup.correct_output_scale", (size,), dtype=torch.float32)
        self.embedding = LayerEmbedding(arch, ctx, index)

    def step(self, streams: Sequence[Tensor], embeddings: Tensor, ctx: ForwardContext) -> list[Tensor]:
        """Shapes: streams [T, E] each, embeddings [T, L * P]."""
        predicted = self.altup.predict(streams)
        computed = self(predicted[self.spec.active], ctx)
        return self._embed(self.altup.correct(predicted, computed), embeddings)

    def _mix(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """(hidden + norm(attention) + laurel) / sqrt(2)."""
        assert self.input_norm is not None
        normed = self.input_norm(hidden)
        low_rank = self.laurel_norm(self.laurel_right(self.laurel_left(normed)), residual=normed)
        attended = self._add(self._mixed(normed, ctx, None), self.post_attention_norm, hidden)
        half = math.sqrt(0.5)
        return self.ops.scale_add(attended, half, self.ops.scale_add(low_rank, half))

    def _embed(self, streams: Sequence[Tensor], embeddings: Tensor) -> list[Tensor]:
        """The layer's own embedding, gated by the computed stream, added to all streams but the first."""
        read = self.ops.scale_add(streams[self.spec.active], 1.0)
        if self.spec.scales_active:
            self.ops.scale_heads(read, self.active_scale)
        added = self.embedding(read, embeddings)
        return [streams[0], *(self.ops.scale_add(added, 1.0, stream) for stream in streams[1:])]


class Gemma3nForCausalLM(DecoderForCausalLM):
    """Streams made of the token embeddings, layers that compute one of them each, and their mean."""

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`. Raises: ConfigError where the model would be split."""
        spec = arch.streams
        assert spec is not None
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: streams cannot be split between processes yet. Use one process.")
        size, spread, merge = arch.hidden_size, ctx.beside("altup_projections"), ctx.beside("altup_unembed_projections")
        self.embed_layers = LayerEmbeddings(arch, ctx)
        self.spread = [Linear(spread.child(index), size, size) for index in range(spec.count - 1)]
        self.merge = [Linear(merge.child(index), size, size) for index in range(spec.count - 1)]
        self.stream_layers = [Gemma3nLayer(arch, ctx.child(index), index) for index in range(arch.num_layers)]

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        streams, embeddings = self._streams_of(token_ids)
        for layer in self.stream_layers:
            streams = layer.step(streams, embeddings, ctx)
        assert self.norm is not None
        return self.norm(self._merged(streams))

    def _streams_of(self, token_ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """All streams, and the embeddings of all layers. Shapes: -> [T, E] each, [T, L * P]."""
        embedded = self.embed_tokens(token_ids)
        embeddings = self.embed_layers(token_ids, embedded)
        return self._matched(embedded, [linear(embedded) for linear in self.spread]), embeddings

    def _merged(self, streams: Sequence[Tensor]) -> Tensor:
        """Their mean. Shapes: [T, E] each -> [T, E]."""
        parts = [linear(stream) for linear, stream in zip(self.merge, streams[1:], strict=True)]
        first, *others = self._matched(streams[0], parts)
        share = 1.0 / len(streams)
        total = self.ops.scale_add(first, share)
        for other in others:
            total = self.ops.scale_add(other, share, total)
        return total

    def _matched(self, first: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
        """All of them as large as the first."""
        return [first, *(self.ops.match_rms(other, first, LEAST) for other in others)]
