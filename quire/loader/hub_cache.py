"""The models of the hub that are on this machine: huggingface_hub's own cache, which other programs use, too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.gguf.files import is_gguf
from quire.errors import MissingDependency
from quire.loader.gguf.repository import RepositoryModel, find, models_in
from quire.loader.names import HubName


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One repository in the cache, or one GGUF model of it."""

    name: HubName
    num_bytes: int
    modified_at: float
    """Seconds since 1970."""
    revisions: tuple[str, ...]
    """Commits."""
    snapshot: Path | None
    """The newest snapshot."""
    gguf: RepositoryModel | None = None
    """Its files, of which some may be missing; None for the whole repository."""


def cached_models() -> list[CachedModel]:
    """All models in the cache, the newest first; those that quire cannot run included."""
    models = [model for repo in _repositories() for model in _models(repo)]
    return sorted(models, key=lambda model: (-model.modified_at, str(model.name)))


def find_cached(name: HubName) -> CachedModel | None:
    """What is in the cache by a name: without a tag the whole repository.

    Raises: ModelNotFound for a tag that means several models.
    """
    for repo in _repositories():
        if repo.repo_id == name.repository:
            if name.tag is None:
                return _whole(repo)
            found = find(_gguf_models(repo), name.tag, repo.repo_id)
            return None if found is None else _gguf_model(repo, found)
    return None


def delete(model: CachedModel) -> None:
    """Delete a model from the cache; with the last of a repository all that is left of it."""
    repo = next((repo for repo in _repositories() if repo.repo_id == model.name.repository), None)
    if repo is None:
        return
    others = [known for known in _models(repo) if known.name != model.name]
    if model.gguf is None or not others:
        _scan().delete_revisions(*model.revisions).execute()
        return
    _delete_files(repo, set(model.gguf.files))


def _delete_files(repo: Any, paths: set[str]) -> None:
    """Delete files from all snapshots, then what no other file has."""
    files = dict(_files(repo))
    chosen = [file for file, path in files.items() if path in paths]
    for file in chosen:
        file.file_path.unlink(missing_ok=True)
    kept = {file.blob_path for file in files if file not in chosen}
    for blob in {file.blob_path for file in chosen} - kept:
        blob.unlink(missing_ok=True)


def _repositories() -> list[Any]:
    cache = _scan()
    return [] if cache is None else [repo for repo in cache.repos if repo.repo_type == "model"]


def _models(repo: Any) -> Iterator[CachedModel]:
    """Each GGUF model of a repository, and the repository itself where it holds anything else."""
    found = _gguf_models(repo)
    for model in found:
        yield _gguf_model(repo, model)
    if not found or any(path.endswith((".safetensors", "config.json")) for _, path in _files(repo)):
        yield _whole(repo)


def _gguf_models(repo: Any) -> list[RepositoryModel]:
    return models_in({path: file.size_on_disk for file, path in _files(repo) if is_gguf(Path(path))})


def _files(repo: Any) -> Iterator[tuple[Any, str]]:
    """(file, its path in the repository) of all snapshots, the oldest first."""
    for revision in _revisions(repo):
        for file in revision.files:
            yield file, file.file_path.relative_to(revision.snapshot_path).as_posix()


def _revisions(repo: Any) -> list[Any]:
    return sorted(repo.revisions, key=lambda revision: revision.last_modified)


def _gguf_model(repo: Any, model: RepositoryModel) -> CachedModel:
    times = [file.blob_last_modified for file, path in _files(repo) if path in model.files]
    return CachedModel(
        name=HubName(repo.repo_id, model.tag),
        num_bytes=model.num_bytes,
        modified_at=float(max(times)),
        revisions=tuple(revision.commit_hash for revision in repo.revisions),
        snapshot=None,
        gguf=model,
    )


def _whole(repo: Any) -> CachedModel:
    revisions = _revisions(repo)
    return CachedModel(
        name=HubName(repo.repo_id),
        num_bytes=repo.size_on_disk,
        modified_at=float(repo.last_modified),
        revisions=tuple(revision.commit_hash for revision in revisions),
        snapshot=Path(revisions[-1].snapshot_path) if revisions else None,
    )


def _scan() -> Any:
    """The library's report, None while there is no cache."""
    try:
        library = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.errors")
    except ModuleNotFoundError:
        raise MissingDependency(
            "the models of the hub need the package 'huggingface_hub': pip install \"quire[hub]\""
        ) from None
    try:
        return library.scan_cache_dir()
    except library.errors.CacheNotFound:
        return None
