"""Activation functions by their names in config.json."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.errors import ConfigError
from quire.layers.context import LayerContext
from quire.utils.lazy import nearest

ACTIVATIONS = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
    }
)
"""transformers' name -> the name that products know."""
BEHIND = ("quick_gelu", "xielu")
"""Those that no product computes, only an op of their own behind one."""


def activation_of(arch: ModelArch, name: str | None = None) -> str:
    """The product's name for the model's activation, or for the one that transformers calls `name`.

    Raises: ConfigError for one that no product computes.
    """
    name = arch.activation if name is None else name
    if name in BEHIND:
        raise ConfigError(
            f"{arch.source}: the activation {name!r} is supported only in an MLP of two linear layers, "
            f"which {arch.architecture} does not have. Use a model with another activation."
        )
    if name not in ACTIVATIONS:
        hint = nearest(name, ACTIVATIONS) or "."
        raise ConfigError(
            f"{arch.source}: the activation {name!r} is not supported{hint} "
            f"Supported: {', '.join((*ACTIVATIONS, *BEHIND))}."
        )
    return ACTIVATIONS[name]


def ungated_activation_of(arch: ModelArch) -> str:
    """As `activation_of`, or the name of an op without parameters that stands behind a product.

    Raises: ConfigError.
    """
    return arch.activation if arch.activation in BEHIND and arch.activation != "xielu" else activation_of(arch)


class Activation:
    """What stands behind a product: part of it where it can be, else an op of its own."""

    def __init__(self, arch: ModelArch, ctx: LayerContext) -> None:
        self.ops = ctx.ops
        is_behind = arch.activation in BEHIND
        self.behind = arch.activation if is_behind else None
        self.of_product = None if is_behind else activation_of(arch)
        self.parameters = _xielu_parameters(ctx) if self.behind == "xielu" else ()

    def finish(self, x: Tensor) -> Tensor:
        """The product with its activation, which may be there already. Shapes: x [T, F] -> [T, F]. Mutates: x."""
        if self.behind is not None:
            self.ops.activate(x, self.behind, self.parameters)
        return x


def _xielu_parameters(ctx: LayerContext) -> tuple[float, ...]:
    """A layer learns what the squares and the exponentials are multiplied by, before a softplus."""
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    stored = [ctx.tensor(name, shape, dtype=torch.float32) for name, shape in shapes.items()]
    if stored[0].is_meta:
        return (1.0,) * len(stored)
    positive, negative, beta, eps = (tensor.item() for tensor in stored)
    return _softplus(positive), beta + _softplus(negative), beta, eps


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
