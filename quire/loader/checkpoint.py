"""`Checkpoint`: all tensors of a model directory, by name; `open_checkpoint` opens it, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from quire.config.gguf.files import is_gguf
from quire.config.quantized.stored import Header
from quire.loader.gguf.checkpoint import GgufCheckpoint
from quire.loader.gguf.names import StoredTensor
from quire.loader.headers import header_of, read_headers
from quire.loader.mapped_file import MappedFile
from quire.loader.safetensors_header import TensorInfo


class TensorSource(Protocol):
    """The tensors of a model, by transformers' names, whatever the files are."""

    directory: Path
    """Where they come from, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo | StoredTensor]:
        """What the headers say of each."""

    def header(self, name: str) -> Header | None:
        """Of a tensor, if there is one of this name."""

    def view(self, name: str) -> Tensor:
        """A view of a tensor's bytes on disk; copy what shall be kept."""

    def drop(self, names: Iterable[str]) -> None:
        """The views of these tensors are no longer needed in memory."""


def open_checkpoint(path: Path) -> TensorSource:
    """The tensors of a model directory, or of a GGUF file.

    Raises: CheckpointError naming every file and tensor that is damaged, doubled or not there.
    """
    return GgufCheckpoint(path) if is_gguf(path) else Checkpoint(path)


class Checkpoint:
    """The tensors of a directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        """Raises: CheckpointError naming every file and tensor that is damaged, doubled or not there."""
        self.directory = directory
        self.tensors = read_headers(directory)
        self._maps: dict[Path, MappedFile] = {}

    def header(self, name: str) -> Header | None:
        """Of a tensor, if there is one of this name."""
        info = self.tensors.get(name)
        return None if info is None else header_of(info)

    def view(self, name: str) -> Tensor:
        """A view of a tensor's bytes on disk; copy what shall be kept."""
        info = self.tensors[name]
        if info.file not in self._maps:
            self._maps[info.file] = MappedFile(info.file)
        return self._maps[info.file].view(info)

    def drop(self, names: Iterable[str]) -> None:
        """The views of these tensors are no longer needed in memory."""
        for name in names:
            info = self.tensors[name]
            self._maps[info.file].drop(info)
