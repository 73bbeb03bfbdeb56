"""What a method makes of one decoder layer: rounds its weights, after it has moved scales where the method does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.quantize.awq import best_scales, best_shrink
from quire.quantize.compressed import compressed
from quire.quantize.folding import Folder
from quire.quantize.formats import TargetFormat
from quire.quantize.gptq import gptq
from quire.quantize.grid import grid_of
from quire.quantize.smoothing import smoothing_scales
from quire.quantize.statistics import InputGroup, InputRecorder, InputStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How weights are rounded."""

    name: str
    """rtn, gptq or awq."""
    target: TargetFormat
    smoothing: float | None = None
    """SmoothQuant's strength; None leaves the inputs as they are."""

    @property
    def is_calibrated(self) -> bool:
        """Whether it must see the inputs of the layers."""
        return self.name != "rtn" or self.smoothing is not None

    def round_plainly(self, module: str, weight: Tensor) -> dict[str, Tensor]:
        """The tensors that stand for a weight, each number rounded to the nearest. Shapes: weight [N, M]."""
        wide = weight.to(torch.float32)
        grid = grid_of(wide, self.target, weight.dtype)
        return compressed(module, grid.round(wide), grid, weight.dtype)


class CalibratedLayer:
    """A decoder layer in float32, with what came through it."""

    def __init__(
        self,
        method: Method,
        layer: nn.Module,
        run: Callable[[Tensor], Tensor],
        inputs: Sequence[Tensor],
        stored_dtype: torch.dtype,
    ) -> None:
        """Run the layer on the calibration's hidden states and watch. Shapes: inputs [1, T, M] each."""
        self._method = method
        self._layer = layer
        self._stored_dtype = stored_dtype
        recorder = InputRecorder(layer)
        with recorder.recording():
            for hidden in inputs:
                run(hidden)
                recorder.end_run()
        self._groups = recorder.groups
        self._folder = Folder(layer, lambda: run(inputs[0]), stored_dtype)

    @property
    def changed(self) -> set[str]:
        """Parameters other than rounded weights that `move_scales` changed."""
        return self._folder.changed

    def move_scales(self, quantized: set[str]) -> None:
        """Move scales between the layer's parts, as the method does. `quantized`: names within the layer."""
        for group in self._groups:
            weights = [self._weight(name) for name in group.modules if name in quantized]
            scales = self._scales(weights, group.statistics) if weights else None
            if scales is not None:
                self._folder.fold(group, scales)

    def round(self, name: str, module: str) -> dict[str, Tensor]:
        """The tensors that stand for a weight. `name` is that within the layer, `module` that in the checkpoint."""
        method, weight, dtype = self._method, self._weight(name), self._stored_dtype
        gram = self._group(name).statistics.gram
        if method.name == "gptq":
            grid = grid_of(weight, method.target, dtype)
            return compressed(module, gptq(weight, gram, grid), grid, dtype)
        shrink = best_shrink(weight, gram, method.target, dtype) if method.name == "awq" else 1.0
        grid = grid_of(weight, method.target, dtype, shrink)
        return compressed(module, grid.round(weight), grid, dtype)

    def _scales(self, weights: Sequence[Tensor], statistics: InputStatistics) -> Tensor | None:
        if self._method.smoothing is not None:
            return smoothing_scales(weights, statistics, self._method.smoothing)
        if self._method.name == "awq":
            return best_scales(weights, statistics, self._method.target, self._stored_dtype)
        return None

    def _weight(self, name: str) -> Tensor:
        return self._layer.get_submodule(name).get_parameter("weight").detach()

    def _group(self, name: str) -> InputGroup:
        return next(group for group in self._groups if name in group.modules)
