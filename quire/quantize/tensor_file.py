"""Writing and reading safetensors files of any dtype (https://github.com/huggingface/safetensors, "Format")."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.loader.mapped_file import STORED_DTYPES
from quire.loader.safetensors_header import TensorInfo, read_header

NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
ALIGNMENT = 8


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
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            stream.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file that `write_tensors` wrote."""
    infos, _ = read_header(file)
    return {info.name: stored(info) for info in infos}


def stored(info: TensorInfo) -> Tensor:
    """A copy of a tensor, as the file has it."""
    if not info.num_bytes:
        return torch.empty(info.shape, dtype=STORED_DTYPES[info.dtype])
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        data = bytearray(stream.read(info.num_bytes))
    return torch.frombuffer(data, dtype=torch.uint8).view(STORED_DTYPES[info.dtype]).view(info.shape)
