"""From a model's name to a local directory. Downloads data only, never code."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

from quire.errors import MissingDependency, ModelNotFound, shown

ALLOWED_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt")
"""What is fetched from a repository: configs, weights, chat templates, tokenizers."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(name: str, revision: str | None = None) -> Path:
    """The directory of a model: `name` itself, or a snapshot of the repository `org/name` on the Hugging Face hub.

    With HF_HUB_OFFLINE=1 only snapshots that were downloaded before are used.
    Raises: ModelNotFound when there is neither; MissingDependency when a repository is named and huggingface_hub is not
    installed.
    """
    try:
        directory = Path(name).expanduser()
        is_dir, exists = directory.is_dir(), directory.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a directory above that is closed, a user unknown
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFound(f"{shown(name)} cannot be looked up: {reason}. Correct the path.") from None
    if is_dir and revision is not None:
        raise ModelNotFound(
            f"revision={revision!r} has no effect on the directory {name}; leave it out, or give a repository name"
        )
    if is_dir:
        return directory
    if exists:
        raise ModelNotFound(f"{name} is a file; give the directory that holds config.json and the weights.")
    if not _REPOSITORY.fullmatch(name):
        raise ModelNotFound(
            f"no directory {name!r} (looked in {Path.cwd()}), and it is no repository name of the form 'org/name'. "
            "Correct the path, or leave the model out to run the embedded one."
        )
    return _snapshot(name, revision)


def _snapshot(name: str, revision: str | None) -> Path:
    try:
        download = cast(Callable[..., str], importlib.import_module("huggingface_hub").snapshot_download)
    except ModuleNotFoundError:
        raise MissingDependency(
            f"no directory {name!r}, and fetching the repository {name!r} needs the package 'huggingface_hub': "
            'pip install "quire[hub]"'
        ) from None
    try:
        return Path(download(name, revision=revision, allow_patterns=list(ALLOWED_FILES)))
    except (OSError, ValueError) as error:  # what the hub's own errors, and those of the network, derive from
        at = f" at revision {revision!r}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"no directory {name!r}, and the repository {name!r}{at} could not be fetched from the hub "
            f"({type(error).__name__}: {reason}). Check the name and the network (HF_HUB_OFFLINE, HF_TOKEN for gated "
            "models), or give a local directory."
        ) from error
