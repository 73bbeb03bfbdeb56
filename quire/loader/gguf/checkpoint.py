"""`GgufCheckpoint`: the tensors of a GGUF model, by the names that transformers has for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.config.gguf.header import GgufTensor
from quire.config.gguf.tensor_types import PLAIN
from quire.config.quantized.stored import Header
from quire.layers.quantization.schemes import plain
from quire.loader.gguf.changes import changed, keys_and_values
from quire.loader.gguf.names import StoredTensor, read_gguf_tensors
from quire.loader.mapped_file import MappedFile
from quire.loader.safetensors_header import TensorInfo
from quire.ops.contracts.operands import BlockRows


class GgufCheckpoint:
    """The tensors of a model, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises: CheckpointError for a damaged file; ConfigError for an architecture that is not read."""
        self.directory = path
        self.tensors = read_gguf_tensors(path)
        self._maps: dict[Path, MappedFile] = {}
        self._made: dict[str, Tensor] = {}
        """What was computed last: it is read in several parts."""

    def header(self, name: str) -> Header | None:
        """Of a tensor, if there is one of this name."""
        info = self.tensors.get(name)
        return None if info is None else Header(info.dtype, info.shape)

    def view(self, name: str) -> Tensor:
        """A tensor as it is stored; copy what shall be kept.

        Shapes: [..., M] of numbers, or [..., bytes of a row] uint8 of blocks.
        """
        info = self.tensors[name]
        if info.constant is not None:
            return torch.full(info.shape, info.constant)
        if info.is_latent:
            return self._of_latents(info)
        parts = [self._stored(tensor) for tensor in info.stored]
        value = parts[0] if len(parts) == 1 else torch.cat(parts)
        value = value if info.expert is None else value[info.expert]
        value = value if info.change is None else changed(value, info.change)
        return value.view(info.shape) if info.dtype in PLAIN else value

    def _of_latents(self, info: StoredTensor) -> Tensor:
        """Numbers. Shapes: -> [N, M] float32."""
        if info.name not in self._made:
            self._made.clear()
            self._made[info.name] = keys_and_values(*(self._numbers(tensor) for tensor in info.stored))
        return self._made[info.name]

    def _numbers(self, tensor: GgufTensor) -> Tensor:
        stored = self._stored(tensor)
        if tensor.type.name in PLAIN:
            return stored.float()
        return plain(BlockRows(type_name=tensor.type.name, blocks=stored.flatten(0, -2))).view(tensor.shape)

    def _stored(self, tensor: GgufTensor) -> Tensor:
        if tensor.file not in self._maps:
            self._maps[tensor.file] = MappedFile(tensor.file)
        return self._maps[tensor.file].view(_bytes_of(tensor))

    def drop(self, names: Iterable[str]) -> None:
        """The views of these tensors are no longer needed in memory."""
        for info in map(self.tensors.__getitem__, names):
            for tensor in (tensor for tensor in info.stored if tensor.file in self._maps):
                whole = _bytes_of(tensor)
                if info.expert is not None:
                    whole = replace(whole, start=whole.start + info.expert * info.num_bytes, num_bytes=info.num_bytes)
                self._maps[tensor.file].drop(whole)


def _bytes_of(tensor: GgufTensor) -> TensorInfo:
    """A tensor of numbers, or one of bytes that has the blocks of each row."""
    rows, kind = tensor.shape[:-1], tensor.type
    is_plain = kind.name in PLAIN
    return TensorInfo(
        name=tensor.name,
        file=tensor.file,
        dtype=kind.name if is_plain else "U8",
        shape=tensor.shape if is_plain else (*rows, tensor.shape[-1] // kind.block_size * kind.block_bytes),
        start=tensor.start,
        num_bytes=tensor.num_bytes,
    )
