"""How a model can be named: a directory, a repository of the hub (`org/name`), one of its GGUF models
(`org/name:Q4_K_M`), or a short name such as `qwen3:0.6b`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quire.config.gguf.files import is_gguf

SHORT_NAMES_FILE = Path(__file__).with_name("short_names.json")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_NAME = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?(?P<repository>[^\s:]+)(?::(?P<tag>[\w.-]+(?:/[\w.-]+)*))?",
    re.ASCII | re.IGNORECASE,
)
_PATH = re.compile(r"(\.{1,2}|~[\w.-]*)?/\S*|\.{1,2}|~")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub."""

    repository: str
    tag: str | None = None
    """Which of its GGUF files, as llama.cpp and Ollama spell it: `Q4_K_M`."""

    def __str__(self) -> str:
        return self.repository if self.tag is None else f"{self.repository}:{self.tag}"


@cache
def short_names() -> Mapping[str, str]:
    """Short name -> repository on the hub."""
    names: dict[str, str] = json.loads(SHORT_NAMES_FILE.read_text(encoding="utf-8"))
    return names


def is_repository(name: str) -> bool:
    """Whether it has the form org/name."""
    return _REPOSITORY.fullmatch(name) is not None


def repository_of(name: str) -> str:
    """The repository that a short name stands for; any other name is itself."""
    return short_names().get(name.lower(), name)


def hub_name(name: str) -> HubName | None:
    """What a name means on the hub: org/name, org/name:TAG, the same behind hf.co/, or a short name, if anything."""
    found = _HUB_NAME.fullmatch(repository_of(name))
    if found is None or not is_repository(found["repository"]):
        return None
    return HubName(found["repository"], found["tag"])


def short_name_of(repository: str) -> str | None:
    """The short name of a repository with its size, if it has one."""
    return next((name for name, known in short_names().items() if known == repository and ":" in name), None)


def has_short_form(name: str) -> bool:
    """Whether it is a short name, or the size that follows the colon is one that the table lacks."""
    family, colon, size = name.lower().partition(":")
    return name.lower() in short_names() or (bool(colon and size) and " " not in name and family in short_names())


def names_a_model(word: str) -> bool:
    """Whether a word is the name of a model rather than a prompt: a directory, a GGUF file, a path, a short name,
    org/name or org/name:TAG.
    """
    try:
        path = Path(word).expanduser()
        is_directory = bool(word) and (path.is_dir() or (is_gguf(path) and path.is_file()))
    except (OSError, RuntimeError, ValueError):  # too long for a path, or an unknown user
        is_directory = False
    return is_directory or _PATH.fullmatch(word) is not None or has_short_form(word) or hub_name(word) is not None
