"""GGUF models of the hub: only the chosen file is fetched, and for a plan only its header."""

from __future__ import annotations

import atexit
import glob
import importlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.config.gguf.config_json import CONFIGURING, MAX_VECTOR_BYTES, gguf_config
from quire.config.gguf.cursor import MAX_HEADER_BYTES
from quire.config.gguf.files import gguf_files, read_gguf
from quire.config.gguf.header import GgufHeader, GgufProblem, GgufTensor, read_gguf_start
from quire.config.gguf.tensor_types import PLAIN, QUANTIZED
from quire.errors import CheckpointError, ConfigError
from quire.loader.gguf.repository import DEFAULT_TAG, RepositoryModel, choose, find, models_in
from quire.loader.hub_library import fetching, hub_library
from quire.loader.model_impl import check_runs
from quire.loader.names import HubName
from quire.loader.resume import fetch_files, headers_for
from quire.log import get_logger
from quire.platforms.current import current_capabilities

log = get_logger(__name__)

FIRST_PIECE = 8 << 20
"""Bytes of a header that are asked for first; most have 6 to 12 MB."""
PIECE = 1 << 20
PARTIAL = 206
"""Status of an answer that has a part of a file."""
HEADERS = "quire-gguf-header-"
"""What the directory is called that has headers without weights."""


def cached_gguf(model: HubName, snapshot: Path) -> Path | None:
    """The model that a name means, where a snapshot has all of it: without a tag Q4_K_M, or the only one.

    Raises: ModelNotFound for a tag that means several.
    """
    there = [path for path in snapshot.rglob("*.gguf") if path.is_file()]
    sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in there}
    models = [found for found in models_in(sizes) if not found.missing]
    found = find(models, model.tag or DEFAULT_TAG, model.repository)
    if found is None and model.tag is None and len(models) == 1:
        (found,) = models
        log.warning("%s:%s, the only one of its GGUF models on this machine", model.repository, found.tag)
    return None if found is None else snapshot / found.files[0]


def chosen(model: HubName, files: Mapping[str, int]) -> RepositoryModel:
    """The model of a repository that a name means; logs a choice that the user may not expect.

    Raises: ModelNotFound.
    """
    memory = current_capabilities().total_memory
    found, reason = choose(models_in(files), model.tag, model.repository, memory)
    if model.tag is None and found.tag.upper() != DEFAULT_TAG:
        log.warning("%s:%s: %s", model.repository, found.tag, reason)
    return found


def download_gguf(model: HubName, commit: str, revision: str | None, files: Mapping[str, int]) -> Path:
    """Fetch the model that a name means, and nothing else of the repository.

    Raises: ModelNotFound; ConfigError for one that quire cannot run, before its weights are fetched; what
    huggingface_hub raises.
    """
    wanted = chosen(model, files)
    with tempfile.TemporaryDirectory(prefix=HEADERS) as directory:
        _check(model, fetch_headers(model.repository, wanted.files, commit, Path(directory)))
    fetch_files(model.repository, commit, wanted.files)
    patterns = [glob.escape(file) for file in wanted.files]
    found = hub_library().snapshot_download(model.repository, revision=revision, allow_patterns=patterns)
    return Path(found) / wanted.files[0]


def describe_gguf(model: HubName, commit: str, files: Mapping[str, int]) -> Path:
    """A file with the header of the model that a name means, and no weights. It lives as long as this process.

    Raises: ModelNotFound; ConfigError for one that quire cannot run; what huggingface_hub raises.
    """
    directory = Path(tempfile.mkdtemp(prefix=HEADERS))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = fetch_headers(model.repository, chosen(model, files).files, commit, directory)
    _check(model, path)
    return path


def is_description(path: Path) -> bool:
    """Whether a file is one of `describe_gguf`."""
    return any(part.startswith(HEADERS) for part in path.parts)


def _check(model: HubName, path: Path) -> None:
    """Refuse what quire cannot run. Raises: ConfigError, CheckpointError."""
    try:
        check_runs(gguf_config(path), str(path))
        kinds = {tensor.type.name for tensor in read_gguf(path).tensors.values()} - {*PLAIN, *QUANTIZED}
        if kinds:
            raise ConfigError(
                f"{path} has weights of the types {', '.join(sorted(kinds))}, which quire does not read. Choose "
                f"another tag of {model.repository}."
            )
    except ConfigError as error:
        raise type(error)(error.message.replace(f"{path.parent}/", f"{model.repository}/")) from None


def fetch_headers(repository: str, files: Sequence[str], commit: str, directory: Path) -> Path:
    """Files as long as those of a model that have their headers alone; the path of the first.

    Raises: CheckpointError for damaged headers; what huggingface_hub raises.
    """
    paths = gguf_files(directory / Path(files[0]).name)
    for path, file in zip(paths, files, strict=True):
        url = hub_library().hf_hub_url(repository, file, revision=commit)
        try:
            with fetching(repository, file):
                _fetch_header(_Remote(url), path)
        except GgufProblem as problem:
            raise CheckpointError(f"{repository}/{file}: {problem}") from None
    return paths[0]


def _fetch_header(remote: _Remote, path: Path) -> None:
    """Write the header, and the small tensors that belong to the configuration, where the whole file has them."""
    start, header = b"", None
    while header is None and len(start) < min(remote.num_bytes, MAX_HEADER_BYTES):
        start += remote.read(len(start), max(FIRST_PIECE, len(start)))
        header = read_gguf_start(path, start, remote.num_bytes)
    if header is None:
        raise GgufProblem(f"its header has more than {len(start)} bytes")
    with path.open("wb") as file:
        file.truncate(remote.num_bytes)
        file.write(start[: header.num_bytes])
        for tensor in _configuring(header):
            file.seek(tensor.start)
            file.write(remote.read(tensor.start, tensor.num_bytes))


def _configuring(header: GgufHeader) -> list[GgufTensor]:
    return [tensor for tensor in header.tensors if tensor.name in CONFIGURING and tensor.num_bytes <= MAX_VECTOR_BYTES]


class _Remote:
    """A file of the hub, of which parts can be read."""

    def __init__(self, url: str) -> None:
        metadata = importlib.import_module("huggingface_hub.file_download").get_hf_file_metadata(url)
        self.location, self.num_bytes = str(metadata.location), int(metadata.size)
        self.headers = headers_for(url, self.location)

    def read(self, start: int, size: int) -> bytes:
        """Bytes of the file from one on; fewer at its end.

        Raises: what the HTTP client raises; GgufProblem for an answer of another size.
        """
        size = min(size, self.num_bytes - start)
        content = b""
        with _streamed(self.location, {**self.headers, "Range": f"bytes={start}-{start + size - 1}"}) as pieces:
            while len(content) < size and (piece := next(pieces, b"")):
                content += piece
        if len(content) != size:
            raise GgufProblem(f"{len(content)} bytes came where {size} were asked for; try again")
        return content


@contextmanager
def _streamed(url: str, headers: dict[str, str]) -> Iterator[Iterator[bytes]]:
    """The pieces of an answer as they come, from the library's HTTP client: httpx, or requests before its 1.0."""
    session = importlib.import_module("huggingface_hub.utils").get_session()
    is_httpx = callable(session.stream)
    with (
        session.stream("GET", url, headers=headers)
        if is_httpx
        else session.get(url, headers=headers, stream=True) as answer
    ):
        answer.raise_for_status()
        if answer.status_code != PARTIAL:
            raise GgufProblem("the hub does not send parts of files")
        yield answer.iter_bytes(PIECE) if is_httpx else answer.iter_content(PIECE)
