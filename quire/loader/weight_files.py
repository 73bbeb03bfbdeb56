"""Which files of a model directory hold its weights. Reads the index alone; imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire.config.gguf.files import gguf_files, is_gguf
from quire.config.json_file import parse_json, read_bounded
from quire.errors import counted, shown

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 << 20
"""DeepSeek-V3's has 9 MB for 92,000 tensors."""
MAX_INDEX_ENTRIES = 2**18
MAX_NAME = 512
"""Characters of a tensor's name."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def weight_files(directory: Path) -> list[Path]:
    """The files that a checkpoint is read from, in the order of their names; empty where something is wrong."""
    if is_gguf(directory):
        return gguf_files(directory)
    problems: list[str] = []
    listed = listed_files(directory, problems)
    return sorted(set(listed.values()) or single_files(directory, problems))


def listed_files(directory: Path, problems: list[str]) -> dict[str, Path]:
    """tensor name -> file as the index says; empty when there is none or a single model.safetensors makes it moot."""
    index = directory / INDEX
    if (directory / "model.safetensors").is_file() or not index.is_file():
        return {}
    weight_map = _weight_map(index, problems)
    listed: dict[str, Path] = {}
    absent: dict[str, int] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            place = f"{INDEX}: {name[:MAX_NAME]} is said to be in {shown(file_name)}"
            problems.append(f"{place}, which is no file name; correct the index")
            continue
        listed[name] = directory / file_name
        if not listed[name].is_file():
            absent[file_name] = absent.get(file_name, 0) + 1
    for file_name, count in absent.items():
        problems.append(f"{INDEX} lists {file_name} ({counted(count, 'tensor')}), which is not there; download it")
    return {name: file for name, file in listed.items() if file.name not in absent}


def _weight_map(index: Path, problems: list[str]) -> dict[str, Any]:
    try:
        content = read_bounded(index, MAX_INDEX_BYTES) or b""
    except (OSError, ValueError) as error:
        problems.append(f"{index.name} cannot be read: {error}; download it again")
        return {}
    if content.startswith(b"version https://git-lfs"):
        problems.append(f"{index.name} is a Git LFS pointer, not the index: run `git lfs pull` in {index.parent}")
        return {}
    try:
        weight_map = parse_json(content)["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        problems.append(f"{index.name} is damaged ({type(error).__name__}: {error}); download it again")
        return {}
    if isinstance(weight_map, dict) and len(weight_map) > MAX_INDEX_ENTRIES:
        problems.append(f"{index.name} lists {counted(len(weight_map), 'tensor')}, the limit is {MAX_INDEX_ENTRIES}")
        return {}
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{index.name} is damaged (its weight_map lists nothing); download it again")
        return {}
    return weight_map


def single_files(directory: Path, problems: list[str]) -> list[Path]:
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
    if any(is_gguf(file) for file in directory.iterdir()):
        return "GGUF files but no .safetensors file; give the path of the .gguf file itself"
    return f"no .safetensors file; expected model.safetensors or {INDEX} with its shards"
