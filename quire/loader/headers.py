"""The headers of all tensors of a model directory. Names everything that is wrong with the files. Imports no torch."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from functools import partial
from pathlib import Path

from quire.config.quantized.bitsandbytes import is_state
from quire.config.quantized.stored import Header
from quire.errors import CheckpointError, counted
from quire.loader.safetensors_header import FileProblem, TensorInfo, read_header
from quire.loader.weight_files import INDEX, listed_files, single_files

MAX_PROBLEMS = 20
"""Causes that a message lists."""
MAX_NAMES = 3
"""Further tensors that a message names for one cause."""
_NUMBER = re.compile(r"\[[\d, ]*\]|\d+")
"""A shape or a number."""
_TENSOR = re.compile(r"(?<![\w./-])(?!\S*\.(?:json|safetensors)\b)\w+(?:\.\w+)+(?![\w./-])")
"""A name with dots that is no file's."""


def raise_problems(directory: Path, problems: list[str]) -> None:
    """Nothing if there are none.

    Raises: CheckpointError with one line per cause, MAX_PROBLEMS at most.
    """
    if not problems:
        return
    causes = by_cause(problems)
    shown = causes[:MAX_PROBLEMS]
    if len(causes) > len(shown):
        shown.append(f"... and {counted(len(causes) - len(shown), 'more cause')}")
    raise CheckpointError(
        f"The checkpoint in {directory} has {counted(len(problems), 'problem')}:\n"
        + "\n".join(f"  - {line}" for line in shown)
    )


def by_cause(problems: list[str]) -> list[str]:
    """One line for all problems that differ only in names of tensors, their shapes, and numbers."""
    causes: dict[str, list[str]] = {}
    for problem in problems:
        causes.setdefault(_NUMBER.sub("#", _TENSOR.sub("*", problem)), []).append(problem)
    return [_line(alike) for alike in causes.values()]


def _line(alike: list[str]) -> str:
    """The first problem, and the tensors of the others."""
    first, *rest = alike
    if not rest:
        return first
    names = [name[0] for problem in rest[:MAX_NAMES] if (name := _TENSOR.findall(problem))]
    such = f": {', '.join(names)}{', ...' if len(rest) > len(names) else ''}" if names else ""
    return f"{first} (and {len(rest)} more like it{such})"


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Where each tensor lies, by name.

    Raises: CheckpointError naming every file and tensor that is damaged, doubled or not there.
    """
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    listed = listed_files(directory, problems)
    for file in dict.fromkeys(listed.values()) if listed else single_files(directory, problems):
        _add(file, tensors, problems)
    for name, file in listed.items():
        if file.is_file() and (name not in tensors or tensors[name].file != file):
            problems.append(f"{INDEX} says that {file.name} holds {name}, but it does not; download both again")
    raise_problems(directory, problems)
    return tensors


def header_of(info: TensorInfo) -> Header:
    """What readers of quantised weights are told of a tensor."""
    header = Header(info.dtype, info.shape)
    if info.name.endswith(".weight_shape") and info.dtype == "I64" and info.shape == (2,):
        header = replace(header, read=partial(_numbers, info, "2q"))
    if is_state(info.name, header):
        header = replace(header, read=partial(_numbers, info, f"{info.num_bytes}B"))
    return header


def _numbers(info: TensorInfo, layout: str) -> tuple[int, ...]:
    with info.file.open("rb") as stream:
        stream.seek(info.start)
        return struct.unpack(f"<{layout}", stream.read(info.num_bytes))


def _add(file: Path, tensors: dict[str, TensorInfo], problems: list[str]) -> None:
    if file.exists() and not file.is_file():  # a pipe would be waited for
        problems.append(f"{file.name} is no regular file; put the weights themselves there")
        return
    try:
        infos, damaged = read_header(file)
    except FileProblem as problem:
        problems.append(str(problem))
        return
    except OSError as error:
        problems.append(f"{file.name} cannot be read: {error.strerror}")
        return
    problems.extend(damaged)
    for info in infos:
        other = tensors.setdefault(info.name, info)
        if other is not info:
            problems.append(f"{info.name} stands both in {other.file.name} and in {file.name}; remove one of them")
