"""Scales moved from the inputs of linear layers into whatever makes those inputs, so that outputs stay the same.

The maker is found by watching the layer run, never by its family, and a move that changes the layer's output is undone:
whoever else reads the same tensor would have to be changed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from quire.quantize.statistics import InputGroup

MAX_CHANGE = 1e-3
"""Of a layer's output, relative to its size, that counts as float32's rounding."""
BEFORE = {"down_proj": "up_proj", "o_proj": "v_proj", "out_proj": "v_proj"}
"""Linear layers whose inputs are proportional to the outputs of another one in the same module."""
LEAST_SCALE, MOST_SCALE = 1e-4, 1e4

Parameters = Mapping[str, nn.Parameter]


class Folder:
    """Moves scales within a decoder layer."""

    def __init__(self, layer: nn.Module, output: Callable[[], Tensor], stored_dtype: torch.dtype) -> None:
        """`output` runs the layer on some inputs; `stored_dtype` is that of the checkpoint's norms."""
        self._layer = layer
        self._output = output
        self._stored_dtype = stored_dtype
        self.changed: set[str] = set()
        """Parameters of the layer that are no longer those of the checkpoint, beside weights of linear layers."""

    def fold(self, group: InputGroup, scales: Tensor) -> bool:
        """Divide a group's inputs by [M] numbers and multiply its weights; whether that is possible.

        Mutates: the layer, and the group's statistics.
        """
        ways = [way for way in self._ways(group, scales) if way]
        if not ways:
            return False
        expected = self._output()
        for way in ways:
            before = {name: parameter.detach().clone() for name, parameter in self._layer.named_parameters()}
            for parameter, changed in way.items():
                self._layer.get_parameter(parameter).data.copy_(changed)
            for module in group.modules:
                self._layer.get_parameter(f"{module}.weight").data.mul_(scales)
            if _is_close(self._output(), expected):
                self._keep(way)
                group.statistics = group.statistics.divided_by(scales)
                return True
            for parameter, value in before.items():
                self._layer.get_parameter(parameter).data.copy_(value)
        return False

    def _keep(self, way: Mapping[str, Tensor]) -> None:
        """Round what is stored as it is: only weights of linear layers are rounded later."""
        self.changed.update(way)
        for name in way:
            parameter = self._layer.get_parameter(name)
            if parameter.dim() == 1:
                parameter.data.copy_(parameter.data.to(self._stored_dtype))

    def _ways(self, group: InputGroup, scales: Tensor) -> list[dict[str, Tensor]]:
        """Parameters that would make the inputs so much smaller, in each way that there may be."""
        before = self._linear_before(group)
        if before is not None:
            return [self._divided(before, scales)]
        if group.producer is None:
            return []
        norm = self._divided(group.producer, scales)
        weight = f"{group.producer}.weight"
        if weight not in norm:
            return []
        plus_one = {**norm, weight: (self._layer.get_parameter(weight) + 1) / scales - 1}  # Gemma's norms
        return [norm, plus_one]

    def _linear_before(self, group: InputGroup) -> str | None:
        """The linear layer whose outputs the inputs are proportional to."""
        if len(group.modules) != 1:
            return None
        parent, _, name = group.modules[0].rpartition(".")
        before = f"{parent}.{BEFORE[name]}" if name in BEFORE else ""
        modules = dict(self._layer.named_modules())
        module = modules.get(before)
        is_alike = isinstance(module, nn.Linear) and module.out_features == group.statistics.abs_sum.shape[0]
        return before if is_alike else None

    def _divided(self, module: str, scales: Tensor) -> dict[str, Tensor]:
        """A module's parameters, each of its outputs divided."""
        divided = {}
        for name, parameter in self._layer.get_submodule(module).named_parameters(recurse=False):
            if parameter.shape[0] != scales.shape[0]:
                return {}
            divided[f"{module}.{name}"] = parameter / (scales if parameter.dim() == 1 else scales[:, None])
        return divided


def balanced(scales: Tensor) -> Tensor:
    """Scales whose largest and smallest are as far from one."""
    bounded = scales.clamp(LEAST_SCALE, MOST_SCALE)
    return bounded / (bounded.max() * bounded.min()).sqrt()


def _is_close(outputs: Tensor, expected: Tensor) -> bool:
    change = torch.linalg.vector_norm(outputs - expected)
    return bool(change <= MAX_CHANGE * torch.linalg.vector_norm(expected))
