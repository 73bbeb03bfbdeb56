"""What linear layers read while a calibration text runs through them: all that the methods need to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(slots=True, kw_only=True)
class InputStatistics:
    """Sums over the tokens that came. Takes M^2 * 4 bytes."""

    gram: Tensor
    """[M, M] float32: the sum of x^T x."""
    abs_sum: Tensor
    """[M] float32"""
    abs_max: Tensor
    """[M] float32"""
    num_tokens: int = 0

    @classmethod
    def empty(cls, size: int) -> InputStatistics:
        """Of no token."""
        return cls(gram=torch.zeros(size, size), abs_sum=torch.zeros(size), abs_max=torch.zeros(size))

    def add(self, inputs: Tensor) -> None:
        """Shapes: [..., M] float32."""
        rows = inputs.reshape(-1, inputs.shape[-1])
        self.gram.addmm_(rows.T, rows)
        magnitudes = rows.abs()
        self.abs_sum += magnitudes.sum(dim=0)
        torch.maximum(self.abs_max, magnitudes.amax(dim=0), out=self.abs_max)
        self.num_tokens += rows.shape[0]

    def divided_by(self, scales: Tensor) -> InputStatistics:
        """Those of inputs that were divided by [M] numbers."""
        return InputStatistics(
            gram=self.gram / (scales[:, None] * scales),
            abs_sum=self.abs_sum / scales,
            abs_max=self.abs_max / scales,
            num_tokens=self.num_tokens,
        )


@dataclass(slots=True, kw_only=True)
class InputGroup:
    """Linear layers that read the same tensor."""

    statistics: InputStatistics
    modules: list[str]
    """Their names within the decoder layer."""
    producer: str | None
    """The module whose output the tensor is, where one was seen."""


class InputRecorder:
    """Collects statistics of the inputs of a decoder layer's linear layers while the layer runs."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._linear: Mapping[str, nn.Linear] = {
            name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)
        }
        self._kept: list[Tensor] | None = []
        """Tensors of the first run, kept so that no other takes their place in memory and is mistaken for them."""
        self._outputs: dict[int, str] = {}
        self._groups: dict[int, InputGroup] = {}
        self._leaders: dict[str, InputGroup] = {}

    @property
    def groups(self) -> list[InputGroup]:
        """What was found, in the order in which the layer reads."""
        return list(self._leaders.values())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add up what linear layers read within this context."""
        hooks = [module.register_forward_pre_hook(self._reader(name)) for name, module in self._linear.items()]
        for name, module in self._layer.named_modules():
            if name and not isinstance(module, nn.Linear):
                hooks.append(module.register_forward_hook(self._writer(name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def end_run(self) -> None:
        """The layer was run once: it is known who reads the same."""
        self._kept = None

    def _reader(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._kept is not None:
                self._assign(name, args[0])
            if name in self._leaders:
                self._leaders[name].statistics.add(args[0])

        return hook

    def _writer(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._kept is not None and isinstance(output, Tensor):
                self._kept.append(output)
                self._outputs[output.data_ptr()] = name

        return hook

    def _assign(self, name: str, inputs: Tensor) -> None:
        """Let a linear layer lead a group of its own, or join the one that reads the same tensor."""
        assert self._kept is not None
        place = inputs.data_ptr()
        if place in self._groups:
            self._groups[place].modules.append(name)
            return
        self._kept.append(inputs)
        group = InputGroup(
            statistics=InputStatistics.empty(inputs.shape[-1]), modules=[name], producer=self._outputs.get(place)
        )
        self._groups[place] = self._leaders[name] = group
