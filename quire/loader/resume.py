"""Files fetched so that an interrupted download goes on where it stopped, even in another process.

huggingface_hub starts a file anew each time, and checks no hash. So the blobs of files are put into its cache here,
and it finds them there. A blob that is there and is damaged is fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import math
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ModelNotFound
from quire.loader.hub_library import fetching

PART = ".quire-part"
PIECE = 1 << 22
CHECKED_BYTES = 1 << 26
"""Of files in the cache whose hash is compared; of larger ones only the size."""


def fetch_files(repository: str, commit: str, names: Iterable[str]) -> None:
    """Put files of a repository into the cache.

    Raises: what huggingface_hub raises; ModelNotFound when another process is at it, a file came damaged, or the hub
    does not give this one.
    """
    library = importlib.import_module("huggingface_hub")
    blobs = _blobs(repository)
    blobs.mkdir(parents=True, exist_ok=True)
    for name in names:
        with fetching(repository, name):
            _fetch(library.hf_hub_url(repository, name, revision=commit), name, blobs)


def _blobs(repository: str) -> Path:
    download = importlib.import_module("huggingface_hub.file_download")
    constants = importlib.import_module("huggingface_hub.constants")
    folder = str(download.repo_folder_name(repo_id=repository, repo_type="model"))
    return Path(constants.HF_HUB_CACHE).expanduser() / folder / "blobs"


def _fetch(url: str, name: str, blobs: Path) -> None:
    """Fetch one file; nothing where it is in the cache already."""
    download = importlib.import_module("huggingface_hub.file_download")
    metadata = download.get_hf_file_metadata(url)
    blob = blobs / metadata.etag
    if blob.exists() and _is_whole(blob, metadata, most_bytes=CHECKED_BYTES):
        return
    part = blob.with_name(f"{metadata.etag}{PART}")
    with part.open("ab") as file:
        _lock(file.fileno(), name)
        size = file.seek(0, os.SEEK_END)
        if size > metadata.size:
            size = file.truncate(0)
        if size < metadata.size:
            download.http_get(
                metadata.location,
                file,
                resume_size=size,
                headers=headers_for(url, metadata.location),
                expected_size=metadata.size,
                displayed_filename=name,
            )
        file.flush()
        os.fsync(file.fileno())
        if not _is_whole(part, metadata):
            part.unlink()
            raise ModelNotFound(
                f"{name} came damaged (its hash is not the one the hub says); it was deleted. Try again."
            )
        part.replace(blob)


def headers_for(url: str, location: str) -> dict[str, Any]:
    """What the hub wants to see; another host does not get the token."""
    headers: dict[str, Any] = importlib.import_module("huggingface_hub.utils").build_hf_headers()
    if urlsplit(url).netloc != urlsplit(location).netloc:
        headers.pop("authorization", None)
    return headers


def _lock(descriptor: int, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelNotFound(f"another process is downloading {name}; wait for it, then try again") from None


def _is_whole(file: Path, metadata: Any, *, most_bytes: float = math.inf) -> bool:
    """Whether a file has the size that the hub says, and the hash, which is compared of files up to `most_bytes`."""
    size = file.stat().st_size
    if size != metadata.size:
        return False
    hashes = _hashes(size, len(metadata.etag))
    if not hashes or size > most_bytes:
        return True
    with file.open("rb") as data:
        while piece := data.read(PIECE):
            for digest in hashes:
                digest.update(piece)
    return str(metadata.etag) in {digest.hexdigest() for digest in hashes}


def _hashes(size: int, num_digits: int) -> list[Any]:
    """What an ETag may be: the SHA-256 of a large file; git's hash of a small one, or its SHA-1 on other hubs."""
    if num_digits == 64:
        return [hashlib.sha256()]
    sha1 = partial(hashlib.sha1, usedforsecurity=False)
    return [sha1(f"blob {size}\0".encode()), sha1()] if num_digits == 40 else []
