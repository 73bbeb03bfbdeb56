"""Writing and reading safetensors files of any dtype (https://github.com/huggingface/safetensors, "Format")."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.loader.mapped_file import STORED_DTYPES
from quire.loader.safetensors_header import TensorInfo, read_header

NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
ALIGNMENT = 8
UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written."""


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """Where to write what becomes a file, which is there whole or not at all.

    Raises: OSError naming the file.
    """
    unfinished = file.with_name(f"{file.name}{UNFINISHED}")
    try:
        yield unfinished
        unfinished.replace(file)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(file)) from None


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file, which is there whole or not at all. The same tensors give the same bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in sorted(tensors):
        end = start + tensors[name].nbytes
        header[name] = {
            "dtype": NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with written_whole(file) as unfinished, unfinished.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            stream.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file that `write_tensors` wrote."""
    infos, _ = read_header(file)
    return {info.name: stored(info) for info in infos}


def stored(info: TensorInfo) -> Tensor:
    """A copy of a tensor, as the file has it.

    Raises: CheckpointError where the file has become shorter than its header says.
    """
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=STORED_DTYPES[info.dtype])
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        data = bytearray(stream.read(info.num_bytes))
    if len(data) < info.num_bytes:
        raise CheckpointError(f"{info.file} ends within {info.name}: it was changed while it was read; start again")
    return torch.frombuffer(data, dtype=torch.uint8).view(STORED_DTYPES[info.dtype]).view(info.shape)
