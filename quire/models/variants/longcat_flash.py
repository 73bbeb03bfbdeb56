"""LongCat Flash: what the checkpoint calls a layer is two of quire's, with a mixture of experts beside both."""

from __future__ import annotations

from torch import Tensor

from quire.attention.context import ForwardContext
from quire.config.arch import ModelArch
from quire.config.family_spec import mixture
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.layers.experts import MixtureOfExperts
from quire.layers.latent import LatentAttention
from quire.layers.norm import model_norm
from quire.models.blocks import GatedMLP
from quire.models.decoder import DecoderForCausalLM


class Half:
    """Attention and an MLP, each behind a norm."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        """`ctx` is that of the checkpoint's layer; the halves have numbers in it."""
        names, number = arch.family.names, index % 2
        self.input_norm = model_norm(arch, ctx, f"input_layernorm.{number}")
        self.attention = LatentAttention(arch, ctx.child(names.attention).child(number), index)
        self.mlp_norm = model_norm(arch, ctx, f"post_attention_layernorm.{number}")
        self.mlp = GatedMLP(arch, arch.layers[index].mlp, ctx.child("mlps").child(number))

    def attend(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        return self.attention(self.input_norm(hidden), ctx, residual=hidden)


class ShortcutLayer:
    """Two halves. Experts read what the first MLP reads, and are added behind the second."""

    def __init__(self, arch: ModelArch, ctx: LayerContext, index: int) -> None:
        spec = arch.layers[index].mlp.beside
        assert spec is not None
        self.ops = ctx.ops
        self.first, self.second = Half(arch, ctx, index), Half(arch, ctx, index + 1)
        self.experts = MixtureOfExperts(arch, mixture(spec), ctx.child("mlp"))

    def __call__(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Shapes: hidden [T, E] -> [T, E]."""
        mixed, between = self._run_first(hidden, ctx)
        return self.ops.scale_add(mixed, 1.0, self._run_second(between, ctx))

    def _run_first(self, hidden: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor]:
        """What the experts give, and the first half."""
        attended = self.first.attend(hidden, ctx)
        normed = self.first.mlp_norm(attended)
        return self.experts(normed), self.first.mlp(normed, residual=attended)

    def _run_second(self, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        attended = self.second.attend(hidden, ctx)
        return self.second.mlp(self.second.mlp_norm(attended), residual=attended)


class LongcatFlashForCausalLM(DecoderForCausalLM):
    """The decoder, two of whose layers share a mixture of experts."""

    def make_layers(self, arch: ModelArch, ctx: LayerContext) -> None:
        """See `DecoderForCausalLM`. Raises: ConfigError where the model would be split."""
        if ctx.parallel.tp.size > 1:
            raise ConfigError(f"{arch.source}: LongCat Flash cannot be split between processes yet. Use one process.")
        self.shortcut_layers = [
            ShortcutLayer(arch, ctx.child(index // 2), index) for index in range(0, arch.num_layers, 2)
        ]

    def forward(self, token_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """See `interfaces.Model`."""
        hidden = self.embed_tokens(token_ids)
        for layer in self.shortcut_layers:
            hidden = layer(hidden, ctx)
        assert self.norm is not None
        return self.norm(hidden)
