"""From a model's name to a local directory. Downloads data only, never code.

A model that was fetched before is used as it is, without asking the hub, until `quire pull` fetches it again.
"""

from __future__ import annotations

import errno
import importlib
import sys
from pathlib import Path
from typing import Any

from quire.config.gguf.files import gguf_files, gguf_in, is_gguf
from quire.config.json_file import parse_json, read_bounded, read_json_object
from quire.errors import CheckpointError, ConfigError, MissingDependency, ModelNotFound, QuireError, shown
from quire.loader.names import has_short_form, is_repository, repository_of, short_names
from quire.loader.resume import fetch_weights
from quire.loader.weight_files import MAX_INDEX_BYTES
from quire.utils.lazy import nearest

CONFIG_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "vocab.txt", "merges.txt")
"""What is fetched beside the weights: configs, chat templates, tokenizers."""
WEIGHT_FILES = ("*.safetensors",)
IGNORED_FILES = ("*/*", "consolidated*.safetensors")
"""Weights in other formats: folders, and Mistral's own names."""
INDEX_FILE = "model.safetensors.index.json"
UNREACHABLE = {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError"}
"""Names of errors of the library and its HTTP clients."""


def resolve_model(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """The directory of a model: `name` itself, or a snapshot of the repository `org/name` on the Hugging Face hub.

    `name` may also be a short name of `short_names.json`. With HF_HUB_OFFLINE=1 only snapshots that were downloaded
    before are used. `with_weights=False` fetches only the small files, for a tokenizer.
    Raises: ModelNotFound when there is neither; MissingDependency when a repository is named and huggingface_hub is not
    installed; ConfigError for a model that quire cannot run, before its weights are fetched.
    """
    directory = _local(name, revision)
    if directory is not None:
        return directory
    repository = checked_repository(name)
    return cached(repository, revision, with_weights=with_weights) or download(
        repository, revision, with_weights=with_weights
    )


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


def checked_repository(name: str) -> str:
    """The repository that a name means.

    Raises: ModelNotFound for what has no such form.
    """
    repository = repository_of(name)
    if repository == name and has_short_form(name):
        family = name.lower().partition(":")[0]
        sizes = [known for known in short_names() if known.startswith(f"{family}:")]
        raise ModelNotFound(f"no short name {name!r}{nearest(name, sizes) or '.'} Known: {', '.join(sizes)}.")
    if not is_repository(repository):
        raise ModelNotFound(
            f"no directory {name!r} (looked in {Path.cwd()}), and it is no repository name of the form 'org/name' and "
            f"no short name{nearest(name.lower(), list(short_names())) or '.'} "
            "Correct the path, or leave the model out to run the embedded one."
        )
    return repository


def check_kind(name: str, files: list[str]) -> None:
    """Refuse what holds a model in a form that quire does not read.

    Raises: ConfigError saying what would work.
    """
    if "config.json" in files:
        return
    if any(file.endswith(".gguf") for file in files):
        raise ConfigError(
            f"{name} holds GGUF files. Download the one that you want, such as {_gguf_example(files)}, and give the "
            "path of the file."
        )
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


def _gguf_example(files: list[str]) -> str:
    """A file of those, of four bits if there is one."""
    found = sorted(file for file in files if file.endswith(".gguf"))
    return next((file for file in found if "Q4_K_M" in file), found[0])


def cached(repository: str, revision: str | None = None, *, with_weights: bool = True) -> Path | None:
    """The snapshot that is on this machine, None when there is none or its download was interrupted."""
    try:
        found = _library().snapshot_download(
            repository, revision=revision, local_files_only=True, **_patterns(with_weights=with_weights)
        )
    except (OSError, ValueError):  # what the library's own errors derive from
        return None
    directory = Path(found)
    has_config = (directory / "config.json").is_file()
    return directory if not with_weights or (has_config and is_complete(directory)) else None


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


def download(repository: str, revision: str | None = None, *, with_weights: bool = True) -> Path:
    """Fetch what is new of a repository; an interrupted download goes on where it stopped.

    Raises: ModelNotFound when it cannot be fetched; ConfigError for a model that quire cannot run.
    """
    library = _library()
    if not sys.stderr.isatty():
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    try:
        if with_weights:
            check_config(fetch_config(repository, revision) / "config.json")
            fetch_weights(repository, revision, WEIGHT_FILES, IGNORED_FILES)
        found = library.snapshot_download(repository, revision=revision, **_patterns(with_weights=with_weights))
    except QuireError:
        raise
    except Exception as error:  # of the library, its HTTP client, its file locks
        raise _failure(error, repository, revision) from error
    directory = Path(found)
    if with_weights and not is_complete(directory):
        check_kind(repository, [entry.name for entry in directory.iterdir() if entry.name != "config.json"])
        raise ModelNotFound(
            f"the repository {repository!r} has no complete set of *.safetensors files. Use a version of this model "
            "with safetensors."
        )
    return directory


def fetch_config(repository: str, revision: str | None = None) -> Path:
    """A directory with config.json of a repository, and nothing else that is new.

    Raises: ModelNotFound; ConfigError for a repository that holds something else.
    """
    library = _library()
    unreachable = _why_unreachable(repository, revision)
    options = {"revision": revision, "local_files_only": unreachable is not None}
    try:
        return Path(library.hf_hub_download(repository, "config.json", **options)).parent
    except library.errors.EntryNotFoundError as error:
        if isinstance(error, library.errors.LocalEntryNotFoundError):
            raise _failure(unreachable or error, repository, revision) from error
        check_kind(f"the repository {repository}", library.HfApi().list_repo_files(repository, revision=revision))
        raise ModelNotFound(f"the repository {repository!r} has no config.json, so it is no model.") from None
    except Exception as error:
        raise _failure(error, repository, revision) from error


def _why_unreachable(repository: str, revision: str | None) -> Exception | None:
    """The error that says that there is no way to the hub, at once: the library would try again for half a minute."""
    library = _library()
    try:
        library.get_hf_file_metadata(library.hf_hub_url(repository, "config.json", revision=revision))
    except Exception as error:
        return error if _kinds(error) & UNREACHABLE else None
    return None


def check_config(file: Path) -> None:
    """Refuse an architecture that quire cannot run, before weights are fetched.

    Raises: ConfigError.
    """
    from quire.loader.model_impl import check_runs

    check_runs(read_json_object(file, "Download the file again.", CheckpointError) or {}, str(file))


def _patterns(*, with_weights: bool) -> dict[str, list[str]]:
    allowed = [*CONFIG_FILES, *(WEIGHT_FILES if with_weights else ())]
    return {"allow_patterns": allowed, "ignore_patterns": list(IGNORED_FILES)}


def _library() -> Any:
    try:
        importlib.import_module("huggingface_hub.errors")
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise MissingDependency(
            "models of the hub need the package 'huggingface_hub': pip install \"quire[hub]\", or give a directory"
        ) from None


def _kinds(error: Exception) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _failure(error: Exception, repository: str, revision: str | None) -> ModelNotFound:
    """Why a repository could not be fetched, and what to do."""
    kinds = _kinds(error)
    name, at = f"the repository {repository!r}", f" at revision {revision!r}" if revision else ""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if "GatedRepoError" in kinds or status == 403:
        return ModelNotFound(
            f"{name} is gated: its authors ask you to accept their terms. Accept them on https://huggingface.co/"
            f"{repository}, create an access token there, and set HF_TOKEN to it."
        )
    if "RevisionNotFoundError" in kinds:
        return ModelNotFound(f"{name} has no revision {revision!r}. Give a branch, a tag or a whole commit id.")
    if "RepositoryNotFoundError" in kinds or status in (401, 404):
        hint = nearest(repository, list(short_names().values()))
        return ModelNotFound(
            f"no directory {repository!r}, and {name}{at} is not on the hub, or is private{hint}. "
            "Check the name; for a private one set HF_TOKEN."
        )
    constants = importlib.import_module("huggingface_hub.constants")
    if constants.HF_HUB_OFFLINE:
        return ModelNotFound(
            f"{name}{at} is not complete on this machine, and HF_HUB_OFFLINE=1 forbids to fetch it. Run `quire pull "
            f"{repository}` with a network, or give a local directory."
        )
    if kinds & UNREACHABLE:
        return ModelNotFound(
            f"{name}{at} is not on this machine, and the hub at {constants.ENDPOINT} cannot be reached ({error}). "
            "Check the network (HTTPS_PROXY, HF_ENDPOINT), or give a local directory."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelNotFound(
            f"{name} could not be stored: {error.strerror}. Free space, or set HF_HOME to another disk."
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return ModelNotFound(
        f"no directory {repository!r}, and {name}{at} could not be fetched from the hub ({what}). Check the network "
        f"(HF_ENDPOINT, HTTPS_PROXY). What has come is kept, and `quire pull {repository}` continues."
    )
