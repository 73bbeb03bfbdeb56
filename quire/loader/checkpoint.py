"""`Checkpoint`: all tensors of a model directory, by name.

Finds the files and names everything that is wrong with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.errors import CheckpointError, counted
from quire.loader.safetensors_file import FileProblem, MappedFile, TensorInfo, read_header

MAX_PROBLEMS = 20
"""Causes that a message lists."""
MAX_NAMES = 3
"""Further tensors that a message names for one cause."""
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUMBER = re.compile(r"\d+")
_TENSOR = re.compile(r"(?<![\w.])\w+(?:\.\w+)*\.(?:weight|bias|\w*[A-Za-z]_[AB])(?![\w.])")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def raise_problems(directory: Path, problems: list[str]) -> None:
    """Nothing if there are none.

    Raises: CheckpointError with one line per cause, MAX_PROBLEMS at most.
    """
    if not problems:
        return
    causes = by_cause(problems)
    shown = causes[:MAX_PROBLEMS]
    if len(causes) > len(shown):
        shown.append(f"... and {len(causes) - len(shown)} more causes")
    raise CheckpointError(
        f"The checkpoint in {directory} has {counted(len(problems), 'problem')}:\n"
        + "\n".join(f"  - {line}" for line in shown)
    )


def by_cause(problems: list[str]) -> list[str]:
    """One line for all problems that differ only in names of tensors and in numbers."""
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


class Checkpoint:
    """The tensors of a directory, memory-mapped."""

    def __init__(self, directory: Path) -> None:
        """Raises: CheckpointError naming every file and tensor that is damaged, doubled or not there."""
        self.directory = directory
        self.tensors: dict[str, TensorInfo] = {}
        self._maps: dict[Path, MappedFile] = {}
        problems: list[str] = []
        listed = _find_files(directory, problems)
        for file in dict.fromkeys(listed.values()) if listed else _single_files(directory, problems):
            self._add(file, problems)
        for name, file in listed.items():
            if file.is_file() and (name not in self.tensors or self.tensors[name].file != file):
                problems.append(f"{INDEX} says that {file.name} holds {name}, but it does not; download both again")
        raise_problems(directory, problems)

    def _add(self, file: Path, problems: list[str]) -> None:
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
            other = self.tensors.setdefault(info.name, info)
            if other is not info:
                problems.append(f"{info.name} stands both in {other.file.name} and in {file.name}; remove one of them")

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


def _find_files(directory: Path, problems: list[str]) -> dict[str, Path]:
    """tensor name -> file as the index says; empty when there is none or a single model.safetensors makes it moot."""
    index = directory / INDEX
    if (directory / "model.safetensors").is_file() or not index.is_file():
        return {}
    weight_map = _weight_map(index, problems)
    listed: dict[str, Path] = {}
    absent: dict[str, int] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            problems.append(f"{INDEX}: {name} is said to be in {file_name!r}, which is no file name; correct the index")
            continue
        listed[name] = directory / file_name
        if not listed[name].is_file():
            absent[file_name] = absent.get(file_name, 0) + 1
    for file_name, count in absent.items():
        problems.append(f"{INDEX} lists {file_name} ({counted(count, 'tensor')}), which is not there; download it")
    return {name: file for name, file in listed.items() if file.name not in absent}


def _weight_map(index: Path, problems: list[str]) -> dict[str, Any]:
    content = index.read_bytes()
    if content.startswith(b"version https://git-lfs"):
        problems.append(f"{index.name} is a Git LFS pointer, not the index: run `git lfs pull` in {index.parent}")
        return {}
    try:
        weight_map = json.loads(content)["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        problems.append(f"{index.name} is damaged ({type(error).__name__}: {error}); download it again")
        return {}
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{index.name} is damaged (its weight_map lists nothing); download it again")
        return {}
    return weight_map


def _single_files(directory: Path, problems: list[str]) -> list[Path]:
    """The files to read where no index decides."""
    if problems:
        return []
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(directory.glob("*.safetensors"))
    shards = [file for file in found if _SHARD.fullmatch(file.name)]
    if shards or len(found) == 1:
        return shards or found
    problems.append(_nothing_usable(directory, found))
    return []


def _nothing_usable(directory: Path, found: list[Path]) -> str:
    if found:
        names = ", ".join(file.name for file in found)
        return f"several .safetensors files ({names}) but no {INDEX}; add the index or leave one file"
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"only pickle files ({', '.join(pickles[:3])}), which can run code when they are read; convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
        )
    if any(file.suffix == ".gguf" for file in directory.iterdir()):
        return "only GGUF files, which quire cannot read yet; use the safetensors version of the model"
    return f"no .safetensors file; expected model.safetensors or {INDEX} with its shards"
