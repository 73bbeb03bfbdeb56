"""`GgufSource`: the tensors of a GGUF model, by the names that transformers has for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.gguf.architectures import architecture_of
from quire.config.gguf.files import read_gguf
from quire.config.gguf.header import GgufTensor
from quire.config.gguf.metadata import GgufKeys
from quire.loader.gguf.blocks import BLOCKS
from quire.loader.gguf.names import StoredTensor, translated
from quire.loader.safetensors_file import MappedFile, TensorInfo

PLAIN = ("F32", "F16", "BF16")
"""Types of tensors that are numbers as they stand."""
READ = (*PLAIN, *BLOCKS)
"""All types that are read."""


class GgufSource:
    """The tensors of a model, memory-mapped."""

    def __init__(self, path: Path, arch: ModelArch) -> None:
        """Raises: CheckpointError for a damaged file; ConfigError for an architecture that is not read."""
        model = read_gguf(path)
        self.directory = path
        """The model's file, for messages."""
        self.tensors: dict[str, StoredTensor] = translated(model.tensors, arch, architecture_of(GgufKeys(model)))
        self._maps: dict[Path, MappedFile] = {}

    def view(self, name: str) -> Tensor:
        """A tensor as it is stored; copy what shall be kept.

        Shapes: [..., M] of numbers, or [..., bytes of a row] uint8 of blocks.
        """
        info = self.tensors[name]
        stored = self._stored(info.stored)
        value = stored if info.expert is None else stored[info.expert]
        if info.turns is not None:
            value = in_halves(value, info.turns)
        if info.offset:
            value = value.to(torch.float32) - info.offset
        return value if info.dtype in BLOCKS else value.view(info.shape)

    def drop(self, names: Iterable[str]) -> None:
        """The views of these tensors are no longer needed in memory."""
        for info in map(self.tensors.__getitem__, names):
            if info.file in self._maps:
                whole = _bytes_of(info.stored)
                start = whole.start + (info.expert or 0) * info.num_bytes
                self._maps[info.file].drop(replace(whole, start=start, num_bytes=info.num_bytes))

    def _stored(self, tensor: GgufTensor) -> Tensor:
        """What the file has of a tensor."""
        if tensor.file not in self._maps:
            self._maps[tensor.file] = MappedFile(tensor.file)
        return self._maps[tensor.file].view(_bytes_of(tensor))


def _bytes_of(tensor: GgufTensor) -> TensorInfo:
    """A tensor of numbers, or one of bytes that has the blocks of each row."""
    rows, kind = tensor.shape[:-1], tensor.type
    is_plain = kind.name in PLAIN
    shape = tensor.shape if is_plain else (*rows, tensor.shape[-1] // kind.block_size * kind.block_bytes)
    return TensorInfo(
        name=tensor.name,
        file=tensor.file,
        dtype=kind.name if is_plain else "U8",
        shape=shape,
        start=tensor.start,
        num_bytes=tensor.num_bytes,
    )


def in_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of heads whose halves take turns, the first half before the second. Shapes: rows [N, ...] -> [N, ...]."""
    heads = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)
