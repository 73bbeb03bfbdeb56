"""The models of the hub that are on this machine: huggingface_hub's own cache, which other programs use, too."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import MissingDependency


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One repository in the cache."""

    repository: str
    num_bytes: int
    modified_at: float
    """Seconds since 1970."""
    revisions: tuple[str, ...]
    """Commits."""
    snapshot: Path | None
    """The newest snapshot."""


def cached_models() -> list[CachedModel]:
    """All models in the cache, the newest first; those that quire cannot run included."""
    cache = _scan()
    repositories = [] if cache is None else [repo for repo in cache.repos if repo.repo_type == "model"]
    models = [_model(repo) for repo in repositories]
    return sorted(models, key=lambda model: (-model.modified_at, model.repository))


def delete(model: CachedModel) -> None:
    """Delete a model from the cache."""
    cache = _scan()
    if cache is not None:
        cache.delete_revisions(*model.revisions).execute()


def _model(repo: Any) -> CachedModel:
    revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified)
    return CachedModel(
        repository=repo.repo_id,
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
