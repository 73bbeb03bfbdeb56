"""From a model's name to a local directory. Downloads data only, never code.

A model that was fetched before is used as it is, without asking the hub, until `quire pull` fetches it again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from quire.config.gguf.files import gguf_files, gguf_in, is_gguf
from quire.config.json_file import parse_json, read_bounded, read_json_object
from quire.errors import CheckpointError, ConfigError, ModelNotFound, QuireError, shown
from quire.loader.gguf.download import cached_gguf, describe_gguf, download_gguf
from quire.loader.hub_library import failure, files_of, hub_library, refused_file, why_unreachable
from quire.loader.names import HubName, has_short_form, hub_name, short_names
from quire.loader.resume import fetch_files
from quire.loader.weight_files import MAX_INDEX_BYTES
from quire.utils.lazy import nearest

CONFIG_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt")
"""What is fetched beside the weights: configs, chat templates, tokenizers."""
WEIGHT_FILES = ("*.safetensors",)
IGNORED_FILES = ("*/*", "consolidated*.safetensors")
"""Weights in other formats: folders, and Mistral's own names."""
INDEX_FILE = "model.safetensors.index.json"


def resolve_model(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The directory or GGUF file of a model: `name` itself, or what the Hugging Face hub has by that name.

    That is a snapshot of the repository `org/name`, or one of its GGUF files, `org/name:TAG`. `name` may also be a
    short name of `short_names.json`. With HF_HUB_OFFLINE=1 only what was downloaded before is used.
    `with_weights=False` fetches only the small files, for a tokenizer.
    Raises: ModelNotFound when there is neither; MissingDependency when a repository is named and huggingface_hub is not
    installed; ConfigError for a model that quire cannot run, before its weights are fetched.
    """
    directory = _local(name, revision)
    if directory is not None:
        return directory
    model = checked_name(name)
    return cached(model, revision, with_weights=with_weights) or download(model, revision, with_weights=with_weights)


def _local(name: str, revision: str | None) -> Path | None:
    """The directory or GGUF file of that name, if there is one."""
    try:
        directory = Path(name).expanduser()
        is_dir, exists = directory.is_dir(), directory.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a directory that is closed, a user unknown
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelNotFound(f"{shown(name)} cannot be looked up: {reason}. Correct the path.") from None
    if is_dir and revision is not None:
        raise ModelNotFound(
            f"revision={revision!r} has no effect on the directory {name}; leave it out, or give a repository name"
        )
    if is_dir:
        files = [entry.name for entry in directory.iterdir()]
        gguf = None if any(file.endswith(".safetensors") for file in files) else gguf_in(directory)
        if gguf is None:
            check_kind(name, files)
        return gguf or directory
    if exists and is_gguf(directory):
        return gguf_files(directory)[0]
    if exists:
        check_kind(name, [directory.name])
        raise ModelNotFound(
            f"{name} is a file; give the directory that holds config.json and the weights, or a GGUF file (*.gguf)."
        )
    return None


def checked_name(name: str) -> HubName:
    """What a name means on the hub.

    Raises: ModelNotFound for what has no such form.
    """
    model = hub_name(name)
    if model is not None:
        return model
    if has_short_form(name):
        family = name.lower().partition(":")[0]
        sizes = [known for known in short_names() if known.startswith(f"{family}:")]
        raise ModelNotFound(f"no short name {name!r}{nearest(name, sizes) or '.'} Known: {', '.join(sizes)}.")
    raise ModelNotFound(
        f"no directory {name!r} (looked in {Path.cwd()}), and it is no repository name of the form 'org/name' or "
        f"'org/name:TAG' and no short name{nearest(name.lower(), list(short_names())) or '.'} "
        "Correct the path, or leave the model out to run the embedded one."
    )


def check_kind(name: str, files: list[str]) -> None:
    """Refuse what holds a model in a form that quire does not read.

    Raises: ConfigError saying what would work.
    """
    if "config.json" in files:
        return
    if "adapter_config.json" in files:
        raise ConfigError(
            f"{name} is a LoRA adapter (adapter_config.json), and quire does not apply adapters yet. Merge it into its "
            "base model (merge_and_unload() of the package peft), save that, and give the new directory."
        )
    if any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in files):
        raise ConfigError(
            f"{name} has no config.json and holds pickled weights, which quire never opens. Use a model directory with "
            "config.json and *.safetensors."
        )


def cached(model: HubName, revision: str | None = None, *, with_weights: bool = True) -> Path | None:
    """What is on this machine of a model, None when there is nothing or its download was interrupted.

    Raises: ModelNotFound for a tag that means several GGUF files.
    """
    if model.tag is None:
        directory = _snapshot(model, revision, _patterns(with_weights=with_weights))
        has_weights = directory is not None and (directory / "config.json").is_file() and is_complete(directory)
        if has_weights or not with_weights:
            return directory
    directory = _snapshot(model, revision, {"allow_patterns": []})
    return None if directory is None else cached_gguf(model, directory)


def _snapshot(model: HubName, revision: str | None, patterns: Mapping[str, list[str]]) -> Path | None:
    """The directory of a repository on this machine, if it has all files that the patterns mean."""
    try:
        found = hub_library().snapshot_download(model.repository, revision=revision, local_files_only=True, **patterns)
    except (OSError, ValueError):  # what the library's own errors derive from
        return None
    return Path(found)


def has_all_files(model: HubName, snapshot: Path) -> bool:
    """Whether a snapshot on this machine has all that a download of the repository fetches."""
    return is_complete(snapshot) and _snapshot(model, snapshot.name, _patterns(with_weights=True)) is not None


def is_complete(directory: Path) -> bool:
    """Whether all weights that a snapshot names are there."""
    if is_gguf(directory):
        return all(file.is_file() for file in gguf_files(directory))
    if (directory / "model.safetensors").is_file():
        return True
    try:
        data = read_bounded(directory / INDEX_FILE, MAX_INDEX_BYTES)
        if data is None:
            return any(directory.glob("*.safetensors"))
        return all((directory / file).is_file() for file in set(parse_json(data)["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def download(model: HubName, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Fetch what is new of a model; an interrupted download goes on where it stopped.

    Raises: ModelNotFound when it cannot be fetched; ConfigError for a model that quire cannot run.
    """
    if not sys.stderr.isatty():
        hub_library()
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    try:
        commit, files = files_of(model.repository, revision)
        if model.tag is not None or (with_weights and means_gguf(model, files)):
            return download_gguf(model, commit, revision, files)
        fetch_files(model.repository, commit, files.keys() & {"config.json"})
        if with_weights:
            check_config(fetch_config(model, revision) / "config.json")
        patterns = (*CONFIG_FILES, *(WEIGHT_FILES if with_weights else ()))
        fetch_files(model.repository, commit, (file for file in files if _matches(file, patterns)))
        directory = _fetch_snapshot(model, revision, with_weights=with_weights)
    except QuireError:
        raise
    except Exception as error:  # of the library, its HTTP client, its file locks
        raise failure(error, model, revision) from error
    if with_weights and not is_complete(directory):
        check_kind(str(model), [entry.name for entry in directory.iterdir() if entry.name != "config.json"])
        raise ModelNotFound(
            f"the repository {model.repository!r} has no complete set of *.safetensors files. Use a version of this "
            "model with safetensors or GGUF files."
        )
    return directory


def _fetch_snapshot(model: HubName, revision: str | None, *, with_weights: bool) -> Path:
    """The directory of what is read, where the cache has the weights."""
    patterns = _patterns(with_weights=with_weights)
    return Path(hub_library().snapshot_download(model.repository, revision=revision, **patterns))


def means_gguf(model: HubName, files: Mapping[str, int]) -> bool:
    """Whether a name means a GGUF file of the repository: it has a tag, or there are no other weights."""
    return model.tag is not None or (
        any(is_gguf(Path(file)) for file in files) and not any(_is_weight(file) for file in files)
    )


def _is_weight(file: str) -> bool:
    return _matches(file, WEIGHT_FILES)


def _matches(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(file, each) for each in patterns) and not any(fnmatch(file, each) for each in IGNORED_FILES)


def describe(model: HubName, revision: str | None = None) -> Path:
    """What says what a model of the hub is: a directory with its config.json, or the header of its GGUF file.

    Raises: ModelNotFound; ConfigError for what quire cannot run.
    """
    if model.tag is not None or why_unreachable(model.repository, revision) is None:
        try:
            commit, files = files_of(model.repository, revision)
            if means_gguf(model, files):
                return describe_gguf(model, commit, files)
        except QuireError:
            raise
        except Exception as error:
            raise failure(error, model, revision) from error
    directory = fetch_config(model, revision)
    check_config(directory / "config.json")
    return directory


def fetch_config(model: HubName, revision: str | None = None) -> Path:
    """A directory with config.json of a repository, and nothing else that is new.

    Raises: ModelNotFound; ConfigError for a repository that holds something else.
    """
    library, repository = hub_library(), model.repository
    unreachable = why_unreachable(repository, revision)
    options = {"revision": revision, "local_files_only": unreachable is not None}
    try:
        return Path(library.hf_hub_download(repository, "config.json", **options)).parent
    except library.errors.EntryNotFoundError as error:
        if isinstance(error, library.errors.LocalEntryNotFoundError):
            raise failure(unreachable or error, model, revision) from error
        check_kind(f"the repository {repository}", library.HfApi().list_repo_files(repository, revision=revision))
        raise ModelNotFound(f"the repository {repository!r} has no config.json, so it is no model.") from None
    except Exception as error:
        raise refused_file(error, repository, "config.json") or failure(error, model, revision) from error


def check_config(file: Path) -> None:
    """Refuse an architecture that quire cannot run, before weights are fetched.

    Raises: ConfigError.
    """
    from quire.loader.model_impl import check_runs

    check_runs(read_json_object(file, "Download the file again.", CheckpointError) or {}, str(file))


def _patterns(*, with_weights: bool) -> dict[str, list[str]]:
    allowed = [*CONFIG_FILES, *(WEIGHT_FILES if with_weights else ())]
    return {"allow_patterns": allowed, "ignore_patterns": list(IGNORED_FILES)}
