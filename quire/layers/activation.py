"""Activation functions by their names in config.json."""

from __future__ import annotations

from types import MappingProxyType

from quire.config.arch import ModelArch
from quire.errors import ConfigError
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
    }
)
"""transformers' name -> the name that ops know."""


def activation_of(arch: ModelArch) -> str:
    """The op's name for the model's activation.

    Raises: ConfigError for one that no op computes.
    """
    if arch.activation not in ACTIVATIONS:
        hint = nearest(arch.activation, ACTIVATIONS)
        raise ConfigError(
            f"{arch.source}: the activation {arch.activation!r} is not supported{hint} "
            f"Supported: {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[arch.activation]
