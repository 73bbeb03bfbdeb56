"""The package huggingface_hub: imported when it is needed, its errors in words, and what a repository holds."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.errors import MissingDependency, ModelNotFound
from quire.loader.names import HubName, short_names
from quire.utils.lazy import nearest

REASONS = {
    403: "access to it is denied, also with the token in HF_TOKEN, if there is one",
    404: "the hub lists it, and does not have it",
    410: "it was removed",
    451: "it may not be given for legal reasons",
}
"""What the status of the answer to a request for one file means."""
UNREACHABLE = {"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError"}
"""Names of errors of the library and its HTTP clients."""


def hub_library() -> Any:
    """The package. Raises: MissingDependency."""
    try:
        importlib.import_module("huggingface_hub.errors")
        return importlib.import_module("huggingface_hub")
    except ModuleNotFoundError:
        raise MissingDependency(
            "models of the hub need the package 'huggingface_hub': pip install \"quire[hub]\", or give a directory"
        ) from None


def _kinds(error: Exception) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def failure(error: Exception, model: HubName, revision: str | None) -> ModelNotFound:
    """Why a model could not be fetched, and what to do."""
    kinds, repository = _kinds(error), model.repository
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
            f"{model}` with a network, or give a local directory."
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
    if isinstance(error, OSError) and error.filename is not None:
        return ModelNotFound(
            f"{name} could not be stored: {error.filename}: {error.strerror}. Set HF_HOME to a directory that can be "
            "written to."
        )
    if status == 429:
        return ModelNotFound(
            f"the hub at {constants.ENDPOINT} answers no more requests for a while (429). Wait some minutes, then run "
            f"`quire pull {model}`: what has come is kept. With HF_TOKEN set it answers more of them."
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    what = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return ModelNotFound(
        f"no directory {repository!r}, and {name}{at} could not be fetched from the hub ({what}). Check the network "
        f"(HF_ENDPOINT, HTTPS_PROXY). What has come is kept, and `quire pull {model}` continues."
    )


@contextmanager
def fetching(repository: str, name: str) -> Iterator[None]:
    """Raises: ModelNotFound where the hub does not give this one file; else what was raised within."""
    try:
        yield
    except Exception as error:  # of the library or its HTTP client
        refused = refused_file(error, repository, name)
        if refused is None:
            raise
        raise refused from error


def refused_file(error: Exception, repository: str, name: str) -> ModelNotFound | None:
    """The error that says so; None where the reason is no matter of this file alone."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if _kinds(error) & {"GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError"} or status not in REASONS:
        return None
    return ModelNotFound(
        f"the file {name!r} of the repository {repository!r} could not be fetched: {REASONS[status]} ({status}). What "
        f"has come of the others is kept. Run `quire pull {repository}` again; if that does not help, ask its authors."
    )


def why_unreachable(repository: str, revision: str | None) -> Exception | None:
    """The error that says that there is no way to the hub, at once: the library would try again for half a minute."""
    library = hub_library()
    try:
        library.get_hf_file_metadata(library.hf_hub_url(repository, "config.json", revision=revision))
    except Exception as error:
        return error if _kinds(error) & UNREACHABLE else None
    return None


def files_of(repository: str, revision: str | None = None) -> tuple[str, dict[str, int]]:
    """(commit, path of each file -> bytes) of a repository.

    Raises: what huggingface_hub raises.
    """
    info = hub_library().HfApi().model_info(repository, revision=revision, files_metadata=True)
    return str(info.sha), {file.rfilename: int(file.size or 0) for file in info.siblings or ()}
