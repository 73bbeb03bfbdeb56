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
from quire.loader.gguf.names import read_gguf_tensors
from quire.loader.mapped_file import MappedFile
from quire.loader.safetensors_header import TensorInfo


class GgufCheckpoint:
    """The tensors of a model, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises: CheckpointError for a damaged file; ConfigError for an architecture that is not read."""
        self.directory = path
        self.tensors = read_gguf_tensors(path)
        self._maps: dict[Path, MappedFile] = {}

    def header(self, name: str) -> Header | None:
        """Of a tensor, if there is one of this name."""
        info = self.tensors.get(name)
        return None if info is None else Header(info.dtype, info.shape)

    def view(self, name: str) -> Tensor:
        """A tensor as it is stored; copy what shall be kept.

        Shapes: [..., M] of numbers, or [..., bytes of a row] uint8 of blocks.
        """
        info = self.tensors[name]
        if info.file not in self._maps:
            self._maps[info.file] = MappedFile(info.file)
        stored = self._maps[info.file].view(_bytes_of(info.stored))
        value = stored if info.expert is None else stored[info.expert]
        if info.turns is not None:
            value = in_halves(value, info.turns)
        if info.offset:
            value = value.to(torch.float32) - info.offset
        return value.view(info.shape) if info.dtype in PLAIN else value

    def drop(self, names: Iterable[str]) -> None:
        """The views of these tensors are no longer needed in memory."""
        for info in map(self.tensors.__getitem__, names):
            if info.file in self._maps:
                whole = _bytes_of(info.stored)
                start = whole.start + (info.expert or 0) * info.num_bytes
                self._maps[info.file].drop(replace(whole, start=start, num_bytes=info.num_bytes))


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


def in_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of heads whose halves take turns, the first half before the second. Shapes: rows [N, ...] -> [N, ...]."""
    heads = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
