"""The header of a safetensors file, checked before anything trusts it. Imports no torch.

It is read here rather than by the safetensors package so that every fault is named with its file, tensor and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from quire.config.json_file import parse_json
from quire.errors import counted, shown
from quire.loader.weight_files import MAX_NAME

MAX_HEADER_BYTES = 32 << 20
"""One tensor takes some 100 bytes."""
MAX_TENSORS = 2**17
"""Of one file."""
MAX_DIMS = 8
MAX_ELEMENTS = 2**60
LFS_POINTER = b"version https://git-lfs"
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}


class FileProblem(Exception):
    """The whole file is unusable; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies."""

    name: str
    file: Path
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    num_bytes: int


def read_header(file: Path) -> tuple[list[TensorInfo], list[str]]:
    """The tensors of a file and the problems found with single ones.

    Raises: FileProblem when the file cannot be used at all.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(len(LFS_POINTER))
        if prefix == LFS_POINTER:
            raise FileProblem(
                f"{file.name} is a Git LFS pointer ({size} bytes), not the weights: run `git lfs pull` in {file.parent}"
            )
        if size < 8:
            raise FileProblem(
                f"{file.name} is truncated: it has {counted(size, 'byte')}, at least 8 are needed; copy it again"
            )
        header_bytes = int.from_bytes(prefix[:8], "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise FileProblem(
                f"{file.name} is damaged or no safetensors file: its header claims {header_bytes} bytes, the limit is "
                f"{MAX_HEADER_BYTES}; copy it again"
            )
        if header_bytes > size - 8:
            raise FileProblem(
                f"{file.name} is truncated or no safetensors file: its header claims {counted(header_bytes, 'byte')}, "
                f"the file has {size}; copy it again"
            )
        stream.seek(8)
        header = stream.read(header_bytes)
    pairs = _parse(file, header)
    return _infos(file, pairs, 8 + header_bytes, size)


def _parse(file: Path, header: bytes) -> list[tuple[str, Any]]:
    """The header's entries, doubled keys included."""
    try:
        pairs = parse_json(header, _Pairs)
    except ValueError as error:
        raise FileProblem(f"{file.name} has a damaged header ({error}); copy it again") from None
    if not isinstance(pairs, _Pairs):
        raise FileProblem(f"{file.name} has a damaged header (not a JSON object); copy it again")
    if len(pairs) > MAX_TENSORS:
        raise FileProblem(f"{file.name} lists {len(pairs)} tensors, the limit is {MAX_TENSORS}; use several files")
    return [(name, entry) for name, entry in pairs if name != "__metadata__"]


class _Pairs(list[tuple[str, Any]]):
    """A JSON object with its keys in order, doubled ones included."""


def _infos(
    file: Path, pairs: list[tuple[str, Any]], data_start: int, file_bytes: int
) -> tuple[list[TensorInfo], list[str]]:
    infos: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name, entry in pairs:
        if len(name) > MAX_NAME:
            problems.append(f"{file.name}: a tensor's name has {len(name)} characters, the limit is {MAX_NAME}")
            continue
        if name in infos:
            problems.append(f"{file.name}: the header lists {name} twice; write the file again")
            continue
        try:
            infos[name] = _info(file, name, entry, data_start, file_bytes)
        except FileProblem as problem:
            problems.append(f"{file.name}: {name} {problem}")
    problems.extend(_overlaps(file, list(infos.values())))
    return list(infos.values()), problems


def _info(file: Path, name: str, entry: object, data_start: int, file_bytes: int) -> TensorInfo:
    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise FileProblem("has no valid dtype, shape and data_offsets; write the file again")
    if len(shape) > MAX_DIMS or math.prod(max(1, size) for size in shape) > MAX_ELEMENTS:
        raise FileProblem(
            f"has the shape {shown(shape)}; at most {MAX_DIMS} dimensions of {MAX_ELEMENTS} elements in all can be "
            "read; write the file again"
        )
    item_bytes = DTYPE_BYTES.get(dtype)
    if item_bytes is None:
        raise FileProblem(f"has the unknown dtype {shown(dtype)}; convert it to float32, bfloat16 or float16")
    begin, end = offsets
    expected = math.prod(shape) * item_bytes
    if end - begin != expected:
        has = counted(end - begin, "byte")
        raise FileProblem(f"has {has}, but {dtype} {list(shape)} takes {expected}; write the file again")
    if data_start + end > file_bytes:
        raise FileProblem(f"ends at byte {data_start + end}, but the file is truncated at {file_bytes}; copy it again")
    return TensorInfo(
        name=name, file=file, dtype=dtype, shape=tuple(shape), start=data_start + begin, num_bytes=expected
    )


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _overlaps(file: Path, infos: list[TensorInfo]) -> Iterator[str]:
    ordered = sorted((info for info in infos if info.num_bytes), key=lambda info: info.start)
    for before, after in pairwise(ordered):
        if before.start + before.num_bytes > after.start:
            yield f"{file.name}: {after.name} overlaps {before.name}; write the file again"
