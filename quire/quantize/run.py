"""`quantize`: read a checkpoint, quantise it layer by layer, write another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire import __version__
from quire.config.arch import ModelArch
from quire.errors import CheckpointError, ConfigError
from quire.loader.checkpoint import Checkpoint
from quire.loader.mapped_file import STORED_DTYPES
from quire.loader.safetensors_header import TensorInfo, read_header
from quire.quantize.compressed import decompressed
from quire.quantize.layerwise import LayerwiseModel
from quire.quantize.methods import CalibratedLayer, Method
from quire.quantize.output import REPORT, OutputDirectory, alone_in
from quire.quantize.report import Perplexity, Report
from quire.quantize.selection import WEIGHT, Selection, check_model, select
from quire.quantize.tensor_file import stored
from quire.quantize.texts import Blocks, read_blocks
from quire.tokenizer.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """What is asked for."""

    directory: Path
    """The model's."""
    out: Path
    method: Method
    ignore: Sequence[str]
    """Patterns of linear layers that stay."""
    calibration: Path
    """A text."""
    max_blocks: int
    """Of the text, to calibrate with."""
    sequence_len: int
    """Tokens of a block."""
    measures: bool
    """Whether to measure perplexity."""

    @property
    def reads_text(self) -> bool:
        """Whether the model must run."""
        return self.measures or self.method.is_calibrated


def quantize(options: QuantizeOptions, arch: ModelArch, progress: Callable[[int, int], None]) -> Report:
    """Write the quantised checkpoint; `progress` hears how many files of how many are written.

    Raises: ConfigError and its kin.
    """
    check_model(arch)
    checkpoint = Checkpoint(options.directory)
    selection = select(checkpoint.tensors, options.ignore, options.method.target, arch)
    blocks = _blocks(options) if options.reads_text else None
    with alone_in(options.out):
        recipe, num_bytes = _recipe(options, checkpoint), _num_bytes(checkpoint, selection, options)
        output = OutputDirectory(options.out, recipe, len(selection.layers) + 1, num_bytes)
        run = _Run(options, checkpoint, selection, output, progress)
        perplexity = None
        if blocks is None:
            run.plainly()
        else:
            perplexity = run.through_text(blocks)
        _check_unchanged(options, checkpoint, recipe["model"])
        return _finish(options, arch, selection, output, perplexity, _total(checkpoint.tensors.values()))


class _Run:
    """The layers on their way."""

    def __init__(
        self,
        options: QuantizeOptions,
        checkpoint: Checkpoint,
        selection: Selection,
        output: OutputDirectory,
        progress: Callable[[int, int], None],
    ) -> None:
        self._method, self._options = options.method, options
        self._checkpoint, self._selection, self._output = checkpoint, selection, output
        self._progress = progress
        self._num_finished = output.num_finished

    def plainly(self) -> None:
        """Round every weight to the nearest, tensor by tensor: no model is built."""
        self._write_outside()
        for index in range(len(self._selection.layers)):
            self._write(index + 1, partial(self._plain_layer, index))

    def through_text(self, blocks: Blocks) -> Perplexity | None:
        """The same by any method, with the model at hand, and measure its perplexity on the way."""
        model = LayerwiseModel(self._options.directory, self._selection.prefix)
        self._check_modules(model)
        self._write_outside()
        held_out = blocks.held_out if self._options.measures else []
        calibration = blocks.calibration if self._method.is_calibrated else []
        hidden = model.start([*calibration, *held_out])
        inputs, before = hidden[: len(calibration)], hidden[len(calibration) :]
        after = before
        for index in range(len(self._selection.layers)):
            with model.widened(index) as layer:

                def forward(states: Tensor, index: int = index) -> Tensor:
                    return model.run(index, states)

                before = list(map(forward, before))
                self._put(layer, index, self._layer(index, layer, forward, inputs))
                inputs, after = list(map(forward, inputs)), list(map(forward, after))
        if not held_out:
            return None
        return Perplexity(
            before=model.perplexity(before, held_out),
            after=model.perplexity(after, held_out),
            num_tokens=sum(len(block) - 1 for block in held_out),
        )

    def _layer(
        self, index: int, layer: nn.Module, forward: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]
    ) -> Mapping[str, Tensor]:
        """The tensors of a decoder layer, made or read again."""
        if not self._method.is_calibrated:
            return self._write(index + 1, lambda: self._plain_layer(index))
        return self._write(index + 1, lambda: self._calibrated_layer(index, layer, forward, inputs))

    def _plain_layer(self, index: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name in self._selection.layers[index]:
            module = name.removesuffix(WEIGHT)
            if name.endswith(WEIGHT) and module in self._selection.modules:
                tensors |= self._method.round_plainly(module, self._stored(name))
            else:
                tensors[name] = self._stored(name)
        return tensors

    def _calibrated_layer(
        self, index: int, layer: nn.Module, forward: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        local = self._local_names(index)
        modules = self._selection.modules_of(index)
        first = self._checkpoint.tensors[modules[0] + WEIGHT]
        calibrated = CalibratedLayer(self._method, layer, forward, inputs, STORED_DTYPES[first.dtype])
        calibrated.move_scales({local[module] for module in modules})
        tensors: dict[str, Tensor] = {}
        for module in modules:
            tensors |= calibrated.round(local[module], module)
        for name in self._selection.layers[index]:
            if name.removesuffix(WEIGHT) in modules and name.endswith(WEIGHT):
                continue
            tensors[name] = self._stored(name)
            if local[name] in calibrated.changed:
                tensors[name] = layer.get_parameter(local[name]).detach().to(tensors[name].dtype)
        return tensors

    def _put(self, layer: nn.Module, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Make a decoder layer compute what its written tensors stand for."""
        local = self._local_names(index)
        modules = self._selection.modules_of(index)
        for module in modules:
            weight = decompressed(module, tensors, self._method.target)
            layer.get_parameter(local[module] + WEIGHT).data.copy_(weight)
        parameters = dict(layer.named_parameters())
        for name in self._selection.layers[index]:
            if name in tensors and name.removesuffix(WEIGHT) not in modules and local[name] in parameters:
                parameters[local[name]].data.copy_(tensors[name])

    def _write_outside(self) -> None:
        self._write(0, lambda: {name: self._stored(name) for name in self._selection.outside})

    def _write(self, index: int, make: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """Write a file, unless that was done before; the tensors in it."""
        if index < self._num_finished:
            tensors: Mapping[str, Tensor] = self._output.read(index) if self._options.reads_text else {}
        else:
            tensors = make()
            self._output.write(index, tensors)
        self._progress(index + 1, len(self._selection.layers) + 1)
        return tensors

    def _stored(self, name: str) -> Tensor:
        return stored(self._checkpoint.tensors[name])

    def _local_names(self, index: int) -> dict[str, str]:
        """Names of a decoder layer's tensors and modules -> names within it."""
        prefix = f"{self._selection.prefix}.{index}."
        names = (*self._selection.layers[index], *self._selection.modules_of(index))
        return {name: name.removeprefix(prefix) for name in names}

    def _check_modules(self, model: LayerwiseModel) -> None:
        """Raises: ConfigError when transformers computes a weight by other means than a linear layer."""
        for index, layer in enumerate(model.layers):
            linear = {name for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
            local = self._local_names(index)
            for module in self._selection.modules_of(index):
                if local[module] not in linear:
                    raise ConfigError(
                        f"{module} is no linear layer of its own in transformers (experts are computed together), so "
                        "it can be neither calibrated nor measured; use --method rtn --no-perplexity"
                    )


def _blocks(options: QuantizeOptions) -> Blocks:
    tokenizer = load_tokenizer(options.directory)
    return read_blocks(options.calibration, tokenizer, options.sequence_len, options.max_blocks)


def _recipe(options: QuantizeOptions, checkpoint: Checkpoint) -> dict[str, Any]:
    """All that the bytes of the output depend on."""
    method = options.method
    recipe: dict[str, Any] = {
        "quire": __version__,
        "model": _fingerprint(options.directory, checkpoint),
        "format": method.target.name,
        "group_size": method.target.group_size,
        "symmetric": method.target.symmetric,
        "method": method.name,
        "ignore": list(options.ignore),
    }
    if method.is_calibrated:
        recipe |= {
            "smoothing": method.smoothing,
            "calibration": hashlib.sha256(options.calibration.read_bytes()).hexdigest(),
            "max_blocks": options.max_blocks,
            "sequence_len": options.sequence_len,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
    return recipe


def _fingerprint(directory: Path, checkpoint: Checkpoint) -> str:
    """Of config.json and of names, sizes and times of the weight files."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted({info.file for info in checkpoint.tensors.values()}):
        status = file.stat()
        digest.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _check_unchanged(options: QuantizeOptions, checkpoint: Checkpoint, before: str) -> None:
    """Raises: CheckpointError where the model has another fingerprint than before."""
    if _fingerprint(options.directory, checkpoint) != before:
        raise CheckpointError(
            f"{options.directory} changed while it was read, so {options.out} holds parts of two models; delete "
            f"{options.out} and start again"
        )


def _num_bytes(checkpoint: Checkpoint, selection: Selection, options: QuantizeOptions) -> int:
    """About what will be written."""
    target, total = options.method.target, 0
    for name, info in checkpoint.tensors.items():
        total += info.num_bytes
        if name.endswith(WEIGHT) and name.removesuffix(WEIGHT) in selection.modules:
            rows, columns = info.shape
            groups = columns // (target.group_size or columns)
            total += rows * columns * target.bits // 8 + rows * groups * 5 - info.num_bytes
    return total


def _finish(
    options: QuantizeOptions,
    arch: ModelArch,
    selection: Selection,
    output: OutputDirectory,
    perplexity: Perplexity | None,
    bytes_before: int,
) -> Report:
    """Write the index, the configuration and the report."""
    headers = [read_header(file)[0] for file in output.files]
    total = sum(map(_total, headers))
    report = Report(
        directory=str(options.out),
        format=options.method.target.name,
        method=options.method.name,
        num_quantized=len(selection.modules),
        bytes_before=bytes_before,
        bytes_after=total,
        perplexity=perplexity,
    )
    output.write_json(REPORT, report.as_json())
    config = json.loads((options.directory / "config.json").read_bytes())
    config["quantization_config"] = options.method.target.quantization_config(selection.ignored)
    names = [[info.name for info in header] for header in headers]
    output.finish(options.directory, config, names, total)
    return report


def _total(infos: Iterable[TensorInfo]) -> int:
    return sum(info.num_bytes for info in infos)
