"""`GgufModel`: the file of a model, or all the files that one was split into, as one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quire.config.gguf.cursor import Value
from quire.config.gguf.header import AGAIN, GgufHeader, GgufProblem, GgufTensor, read_gguf_header
from quire.errors import CheckpointError, ConfigError, counted

SUFFIX = ".gguf"
MAX_PARTS = 10_000
MAX_PROBLEMS = 20
"""That a message lists."""
_PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """What the headers of a model say."""

    path: Path
    """The file, or the first one of a split set."""
    headers: tuple[GgufHeader, ...]
    """One for each file."""
    metadata: Mapping[str, Value]
    """Of the first file: the others repeat none of it."""
    tensors: Mapping[str, GgufTensor]
    """By GGUF's names."""


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file."""
    return path.suffix == SUFFIX


def gguf_files(path: Path) -> list[Path]:
    """The files of the model that a path names: itself, or all parts of the set that it belongs to, in order."""
    found = _PART.fullmatch(path.name)
    if found is None or not 0 < int(found["count"]) <= MAX_PARTS:
        return [path]
    parts = range(1, int(found["count"]) + 1)
    return [path.with_name(f"{found['stem']}-{part:05}-of-{found['count']}{SUFFIX}") for part in parts]


def gguf_in(directory: Path) -> Path | None:
    """The GGUF model of a directory that has no other one; None where there is none.

    Raises: ConfigError for several, naming them.
    """
    files = sorted(file for file in directory.iterdir() if is_gguf(file))
    models = list(dict.fromkeys(gguf_files(file)[0] for file in files if not is_beside(file.name)))
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ConfigError(
            f"{directory} holds {counted(len(models), 'GGUF model')} ({names}). Give the file of one: {models[0]}"
        )
    return models[0] if models else None


def is_beside(name: str) -> bool:
    """Whether a file holds what models for images or their quantisation need beside the model."""
    return "mmproj" in name or name.startswith("imatrix")


def read_gguf(path: Path) -> GgufModel:
    """The headers of a model, checked.

    Raises: CheckpointError naming every file, tensor and number that is wrong, and the remedy.
    """
    files = gguf_files(path)
    try:
        return _known(files[0], tuple(_stamp(file) for file in files))
    except FileNotFoundError:
        missing = [file.name for file in files if not file.exists()]
        raise _error(path, [f"{counted(len(missing), 'file')} missing: {', '.join(missing[:5])}; {AGAIN}"]) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from None


def _stamp(file: Path) -> tuple[int, ...]:
    """What differs when a file was replaced or written to. Raises: OSError."""
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=1)
def _known(path: Path, stamps: tuple[tuple[int, ...], ...]) -> GgufModel:
    """The model of files that have not changed since they were read last.

    Raises: CheckpointError; OSError.
    """
    problems: list[str] = []
    headers = tuple(_read_headers(gguf_files(path), problems))
    if not problems:
        problems.extend(_split_problems(headers))
    tensors: dict[str, GgufTensor] = {}
    for tensor in (tensor for header in headers for tensor in header.tensors):
        other = tensors.setdefault(tensor.name, tensor)
        if other is not tensor:
            where = f"both in {other.file.name} and in {tensor.file.name}"
            problems.append(f"{tensor.name} stands {where}; the files belong to different models")
    if problems:
        raise _error(path, problems)
    return GgufModel(path=path, headers=headers, metadata=headers[0].metadata, tensors=tensors)


def _read_headers(files: Sequence[Path], problems: list[str]) -> Iterator[GgufHeader]:
    for file in files:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            problems.append(f"{file.name} is no regular file; put the model itself there")
            continue
        try:
            yield read_gguf_header(file)
        except GgufProblem as problem:
            problems.extend(problem.problems)


def _split_problems(headers: Sequence[GgufHeader]) -> Iterator[str]:
    """What the files of a set say about themselves that is not so."""
    said = headers[0].metadata.get("split.count", 1)
    if said != len(headers) and said != 0:
        yield (
            f"{headers[0].file.name} says that it is one of {said} files, but its name says {len(headers)}; files of a "
            "split model keep their names, such as model-00001-of-00003.gguf"
        )
    if len(headers) == 1:
        return
    for index, header in enumerate(headers):
        number = header.metadata.get("split.no")
        if number != index:
            yield f"{header.file.name} says that it is part {number}, counted from 0, not {index}; {AGAIN}"
    total, listed = sum(len(header.tensors) for header in headers), headers[0].metadata.get("split.tensors.count")
    if listed is not None and listed != total:
        yield f"the files hold {counted(total, 'tensor')}, but {headers[0].file.name} says {listed}; {AGAIN}"


def _error(path: Path, problems: Sequence[str]) -> CheckpointError:
    shown = list(problems[:MAX_PROBLEMS])
    if len(problems) > len(shown):
        shown.append(f"... and {len(problems) - len(shown)} more")
    lines = "\n".join(f"  - {line}" for line in shown)
    return CheckpointError(f"The GGUF model {path} has {counted(len(problems), 'problem')}:\n{lines}")
