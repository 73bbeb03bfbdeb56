"""Hyper-connections: several hidden states of each token (streams), which every half of a layer reads and writes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.layers.context import LayerContext
from quire.layers.experts import MixtureOfExperts
from quire.layers.norm import model_norm
from quire.layers.quantization.schemes import DENSE
from quire.models.blocks import mixer_of, mlp_of
from quire.models.decoder import DecoderForCausalLM
from quire.ops.contracts.operands import HyperWeights


class HyperConnection:
    """What a half of a layer reads of the streams, and how it writes them."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, prefix: str, *, only_reads: bool = False) -> None:
        """`prefix` begins the names of the parameters in `ctx`."""
        hyper = arch.hyper
        assert hyper is not None
        self.ops = ctx.ops
        parts = hyper.parts[:1] if only_reads else hyper.parts
        count = sum(parts)
        # In float32 whatever the model's dtype, as they were trained.
        exact, name = replace(ctx, scheme=DENSE, dtype=torch.float32), f"{prefix}fn"
        self.products = exact.packed([name], [exact.read(name, (count, hyper.count * arch.hidden_size))])
        scale = ctx.tensor(f"{prefix}scale", (len(parts),), dtype=torch.float32)
        self.weights = HyperWeights(
            count=hyper.count,
            scale=scale if scale.is_meta else scale.repeat_interleave(torch.tensor(parts)),
            base=ctx.tensor(f"{prefix}base", (count,), dtype=torch.float32),
            iterations=hyper.iterations,
            eps=hyper.eps,
            norm_eps=arch.norm_eps,
            magnitude=hyper.magnitude,
            least_added=hyper.least_added,
        )

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops.read_streams`. Shapes: streams [T, S * E] -> [T, E], [T, numbers for `write_streams`] float32."""
        products = self.ops.linear(streams, self.products, out_dtype=torch.float32)
        return self.ops.read_streams(streams, products, self.weights)

    def read_last(self, streams: Tensor) -> Tensor:
        """As `read`, where nothing is written any more. Shapes: streams [T, S * E] -> [T, E]."""
        return self.ops.sum_streams(
            streams, self.ops.linear(streams, self.products, out_dtype=torch.float32), self.weights
        )


class HyperLayer:
    """Attention and an MLP, each behind a norm of what it reads of the streams."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        norms, (around_mixer, around_mlp, _) = arch.norms, arch.family.names.hyper
        assert norms.input is not None
        assert norms.pre_mlp is not None
        self.ops = ctx.ops
        (place,) = arch.places_of(index)
        self.mixer_streams = HyperConnection(arch, ctx, around_mixer)
        self.input_norm = model_norm(arch, ctx, norms.input)
        self.mixer = mixer_of(arch, ctx, place)
        self.mlp_streams = HyperConnection(arch, ctx, around_mlp)
        self.pre_mlp_norm = model_norm(arch, ctx, norms.pre_mlp)
        self.mlp = mlp_of(arch, ctx, index)

    def mix(self, streams: Tensor, ctx: ForwardContext) -> Tensor:
        """The half with attention. Shapes: streams [T, S * E] -> [T, S * E]. Mutates: the layer's caches."""
        read, writing = self.mixer_streams.read(streams)
        return self.ops.write_streams(streams, self.mixer(self.input_norm(read), ctx), writing)

    def feed(self, streams: Tensor, token_ids: Tensor) -> Tensor:
        """The half with the MLP. Shapes: streams [T, S * E], token_ids [T] -> [T, S * E]."""
        read, writing = self.mlp_streams.read(streams)
        return self.ops.write_streams(streams, self._fed(self.pre_mlp_norm(read), token_ids), writing)

    def _fed(self, normed: Tensor, token_ids: Tensor) -> Tensor:
        if isinstance(self.mlp, MixtureOfExperts):
            return self.mlp(normed, token_ids=token_ids)
        return self.mlp(normed)


class HyperForCausalLM(DecoderForCausalLM):
    """Streams made of the token embeddings, layers that read and write them, and one last reading."""

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`."""
        assert arch.hyper is not None
        self.num_streams = arch.hyper.count
        self.hyper_layers = [HyperLayer(arch, ctx.child(index), index) for index in range(arch.num_layers)]
        model = replace(ctx, name=ctx.name.rpartition(".")[0])
        self.last_streams = HyperConnection(arch, model, arch.family.names.hyper[2], only_reads=True)

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        streams = self.ops.join_columns([self.embed_tokens(token_ids)] * self.num_streams)
        for layer in self.hyper_layers:
            streams = layer.mix(streams, ctx)
            streams = layer.feed(streams, token_ids)
        hidden = self.last_streams.read_last(streams)
        assert self.norm is not None
        return self.norm(hidden)
