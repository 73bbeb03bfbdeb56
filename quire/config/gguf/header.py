"""The header of one GGUF file: metadata and tensor infos, checked before anything trusts them."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.config.gguf.cursor import Cursor, HeaderContinues, HeaderProblem, Value
from quire.config.gguf.tensor_types import TENSOR_TYPES, TensorType
from quire.errors import counted

MAGIC = b"GGUF"
LFS_POINTER = b"version https://git-lfs"
_START_BYTES = max(len(LFS_POINTER), 8)
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 4096
MAX_TENSORS = 2**17
"""Of one file."""
MAX_KEYS = 2**16
MAX_NAME = 512
"""Bytes of the name of a tensor or a key."""
MAX_DIMS = 4
MAX_ELEMENTS = 2**60
AGAIN = "copy it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where a tensor lies."""

    name: str
    """As GGUF has it."""
    file: Path
    type: TensorType
    shape: tuple[int, ...]
    """As torch has it: the last dimension is that of neighbours. The file has them the other way round."""
    start: int
    """First byte, counted from the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a file says of itself."""

    file: Path
    version: int
    metadata: Mapping[str, Value]
    num_bytes: int
    """Of metadata and tensor infos, from the start of the file."""
    tensors: tuple[GgufTensor, ...]


class GgufProblem(Exception):
    """A file is unusable. Each of the problems names it and says why."""

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def read_gguf_header(file: Path) -> GgufHeader:
    """Metadata and tensors of a file.

    Raises: GgufProblem; OSError.
    """
    with file.open("rb") as stream:
        _check_start(file, stream.read(_START_BYTES))
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        return _read(file, Cursor(data))


def read_gguf_start(file: Path, start: bytes, file_bytes: int) -> GgufHeader | None:
    """Metadata and tensors of a file that has `file_bytes`, from its first ones; None where the header needs more.

    Raises: GgufProblem.
    """
    _check_start(file, start[:_START_BYTES])
    try:
        return _read(file, Cursor(start, file_bytes))
    except HeaderContinues:
        return None


def _read(file: Path, cursor: Cursor) -> GgufHeader:
    """Raises: GgufProblem; HeaderContinues where only a part of the file is here."""
    try:
        return _header(file, cursor)
    except HeaderContinues:
        raise
    except HeaderProblem as problem:
        raise GgufProblem(f"{file.name} has a damaged header: {problem}; {AGAIN}") from None


def _check_start(file: Path, start: bytes) -> None:
    """Refuse what is no file of a version that is read. Raises: GgufProblem."""
    if start.startswith(LFS_POINTER):
        raise GgufProblem(
            f"{file.name} is a Git LFS pointer, not the weights: run `git lfs pull` in {file.absolute().parent}"
        )
    if start[:4] != MAGIC:
        raise GgufProblem(f"{file.name} is no GGUF file: it does not begin with {MAGIC.decode()}; {AGAIN}")
    if len(start) < 8:
        raise GgufProblem(f"{file.name} is truncated: it has {counted(len(start), 'byte')}; {AGAIN}")
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF == 0 and version:
        raise GgufProblem(f"{file.name} is a GGUF file for big-endian machines; use the one for little-endian machines")
    if version not in VERSIONS:
        raise GgufProblem(
            f"{file.name} is GGUF of version {version}, and versions {' and '.join(map(str, VERSIONS))} are read; "
            "convert the model again with a current llama.cpp"
        )


def _header(file: Path, cursor: Cursor) -> GgufHeader:
    assert sys.byteorder == "little"
    cursor.take(len(MAGIC), "the magic")
    version = cursor.uint32("the version")
    num_tensors = cursor.count("the number of tensors", most=MAX_TENSORS, least_bytes=24)
    num_keys = cursor.count("the number of metadata keys", most=MAX_KEYS, least_bytes=13)
    metadata = _metadata(cursor, num_keys)
    entries = [_entry(cursor) for _ in range(num_tensors)]
    alignment = _alignment(metadata)
    data_start = -(-cursor.position // alignment) * alignment
    tensors, problems = _tensors(file, entries, data_start, alignment, cursor.file_bytes)
    if problems:
        raise GgufProblem(*problems)
    return GgufHeader(file=file, version=version, metadata=metadata, num_bytes=cursor.position, tensors=tensors)


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.text(f"the name of metadata key {index}", MAX_NAME)
        if key in metadata:
            raise HeaderProblem(f"the metadata key {key} is there twice")
        metadata[key] = cursor.value(key)
    return metadata


def _alignment(metadata: Mapping[str, Value]) -> int:
    """Bytes of which the offset of every tensor is a multiple."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 0 < alignment <= MAX_ALIGNMENT:
        raise HeaderProblem(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}")
    if alignment & (alignment - 1):
        raise HeaderProblem(f"general.alignment is {alignment}, which is no power of two")
    return alignment


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor info as the file has it."""

    name: str
    sizes: tuple[int, ...]
    """The dimension of neighbours first."""
    type_id: int
    offset: int


def _entry(cursor: Cursor) -> _Entry:
    name = cursor.text("the name of a tensor", MAX_NAME)
    num_dims = cursor.uint32(f"the number of dimensions of {name}")
    if not 0 < num_dims <= MAX_DIMS:
        raise HeaderProblem(f"{name} has {counted(num_dims, 'dimension')}, the format has 1 to {MAX_DIMS}")
    sizes = tuple(cursor.uint64(f"a dimension of {name}") for _ in range(num_dims))
    return _Entry(name, sizes, cursor.uint32(f"the type of {name}"), cursor.uint64(f"the offset of {name}"))


def _tensors(
    file: Path, entries: list[_Entry], data_start: int, alignment: int, file_bytes: int
) -> tuple[tuple[GgufTensor, ...], list[str]]:
    """Those that are in order, and what is wrong with the others."""
    tensors: dict[str, GgufTensor] = {}
    problems: list[str] = []
    for entry in entries:
        if entry.name in tensors:
            problems.append(f"{file.name}: the header lists {entry.name} twice; write the file again")
            continue
        try:
            tensors[entry.name] = _tensor(file, entry, data_start, alignment, file_bytes)
        except HeaderProblem as problem:
            problems.append(f"{file.name}: {entry.name} {problem}")
    problems = problems or list(_misplaced(file, list(tensors.values()), data_start, alignment, file_bytes))
    return tuple(tensors.values()), problems


def _tensor(file: Path, entry: _Entry, data_start: int, alignment: int, file_bytes: int) -> GgufTensor:
    kind = TENSOR_TYPES.get(entry.type_id)
    if kind is None:
        raise HeaderProblem(f"has the type {entry.type_id}, which no version of the format that is read has; {AGAIN}")
    shape = entry.sizes[::-1]
    if min(shape) == 0 or math.prod(shape) > MAX_ELEMENTS:
        raise HeaderProblem(f"has the shape {list(shape)}; 1 to {MAX_ELEMENTS} elements can be read; {AGAIN}")
    if shape[-1] % kind.block_size:
        raise HeaderProblem(
            f"has rows of {shape[-1]} elements, but {kind.name} has blocks of {kind.block_size}; write the file again"
        )
    if entry.offset % alignment:
        raise HeaderProblem(f"begins at offset {entry.offset}, no multiple of {alignment}; write the file again")
    num_bytes = math.prod(shape) // kind.block_size * kind.block_bytes
    end = data_start + entry.offset + num_bytes
    if end > file_bytes:
        raise HeaderProblem(f"ends at byte {end}, but the file is truncated at {file_bytes}; {AGAIN}")
    start = data_start + entry.offset
    return GgufTensor(name=entry.name, file=file, type=kind, shape=shape, start=start, num_bytes=num_bytes)


def _misplaced(
    file: Path, tensors: list[GgufTensor], data_start: int, alignment: int, file_bytes: int
) -> Iterator[str]:
    """Tensors follow each other without gaps, and nothing follows them, but for what fills up to the alignment.

    Otherwise the file was written with another alignment than it says, and all tensors would be read from wrong places:
    GGUF's own writer leaves the key out of all files but the first of a split model. llama.cpp refuses gaps, too.
    """
    name, end = "the header", data_start
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start < end:
            yield f"{file.name}: {tensor.name} overlaps {name}; write the file again"
        elif tensor.start - end >= alignment or (name == "the header" and tensor.start != end):
            yield (
                f"{file.name}: {tensor.name} begins {tensor.start - end} bytes behind {name}, and tensors follow each "
                f"other at multiples of {alignment}; write the file again"
            )
        name, end = tensor.name, max(end, tensor.start + tensor.num_bytes)
    if tensors and file_bytes - end >= alignment:
        yield (
            f"{file.name}: {file_bytes - end} bytes follow {name}, which is the last tensor, and tensors lie at "
            f"multiples of {alignment} (general.alignment); write the file again"
        )
