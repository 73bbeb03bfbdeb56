"""Several hidden states of each token (streams), which every half of a layer reads through gates (Qwen4-Exp)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.context import LayerContext, refuse_elsewhere
from quire.layers.linear import Linear
from quire.layers.norm import StreamNorm
from quire.layers.quantization.schemes import DENSE
from quire.layers.recurrent.ngrams import NGrams
from quire.models.blocks import mixer_of, mlp_of
from quire.models.decoder import DecoderForCausalLM


class GatedStreams:
    """What a half of a layer reads of the streams, and how it writes them."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, *, only_reads: bool = False) -> None:
        spec = arch.gated_streams
        assert spec is not None
        self.ops, self.count = ctx.ops, spec.count
        width = spec.count * arch.hidden_size
        self.norm = StreamNorm(
            ctx.child("hc_norm"), spec.count, arch.hidden_size, arch.norm_eps, offset=arch.norms.offset
        )
        self.down = Linear(ctx.child("input_mix_weight_down"), width, spec.rank, factors=(1 / spec.count,))
        self.up = Linear(ctx.child("input_mix_weight_up"), spec.rank, width)
        if not only_reads:
            # In float32: so few numbers say what happens to whole streams.
            exact = replace(ctx.child("block_inject_weight"), scheme=DENSE, dtype=torch.float32)
            self.shares = exact.packed(["weight"], [exact.read("weight", (spec.count, width))])

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: streams [T, S * E] -> [T, E], [T, S] float32 for `Ops.write_streams`."""
        normed = self.norm(streams)
        read = self._opened(normed)
        return read, self.ops.stream_shares(self.ops.linear(normed, self.shares, out_dtype=torch.float32))

    def read_last(self, streams: Tensor) -> Tensor:
        """As `read`, where nothing is written any more. Shapes: streams [T, S * E] -> [T, E]."""
        return self._opened(self.norm(streams))

    def _opened(self, normed: Tensor) -> Tensor:
        return self.ops.open_streams(normed, self.up(self.down(normed, activation="silu")), count=self.count)


class GatedStreamsLayer:
    """Embeddings of n-grams where the layer has some, a mixer, and an MLP."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        self.ops = ctx.ops
        *before, place = arch.places_of(index)
        self.ngrams = NGrams(arch, ctx.child("ple"), before[0]) if before else None
        self.mixer_streams = GatedStreams(arch, ctx.child("attn_hyper_connection"))
        self.mixer = mixer_of(arch, ctx, place)
        self.mlp_streams = GatedStreams(arch, ctx.child("mlp_hyper_connection"))
        self.mlp = mlp_of(arch, ctx, index)

    def embed(self, streams: Tensor, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """Add n-grams. Shapes: streams [T, S * E], token_ids [T] -> [T, S * E]. Mutates: the layer's states."""
        return streams if self.ngrams is None else self.ngrams(streams, token_ids, ctx)

    def mix(self, streams: Tensor, ctx: ForwardContext) -> Tensor:
        """The half with the mixer. Shapes: streams [T, S * E] -> [T, S * E]. Mutates: the layer's caches."""
        read, shares = self.mixer_streams.read(streams)
        return self.ops.write_streams(streams, self.mixer(read, ctx), shares)

    def feed(self, streams: Tensor) -> Tensor:
        """The half with the MLP. Shapes: streams [T, S * E] -> [T, S * E]."""
        read, shares = self.mlp_streams.read(streams)
        return self.ops.write_streams(streams, self.mlp(read), shares)


class GatedStreamsForCausalLM(DecoderForCausalLM):
    """Streams made of the token embeddings, layers that read and write them, and one last reading."""

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`."""
        assert arch.gated_streams is not None
        refuse_elsewhere(arch, ctx, "a model of several streams behind gates")
        self.num_streams = arch.gated_streams.count
        self.stream_layers = [GatedStreamsLayer(arch, ctx.child(index), index) for index in range(arch.num_layers)]
        model = replace(ctx, name=ctx.name.rpartition(".")[0])
        self.last_streams = GatedStreams(arch, model.child("hyper_connection_mixer"), only_reads=True)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        streams = self.ops.join_columns([self.embed_tokens(token_ids)] * self.num_streams)
        for layer in self.stream_layers:
            streams = layer.embed(streams, token_ids, ctx)
            streams = layer.mix(streams, ctx)
            streams = layer.feed(streams)
        return self.last_streams.read_last(streams)
