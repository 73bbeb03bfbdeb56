"""The digest of a checkpoint: which weights an engine has. Taken in threads while torch is imported; imports no torch.

A tree of SHA-256 over the bytes of the files, headers included:

    leaf        SHA-256 of up to LEAF_BYTES bytes of a file, which is cut from its start
    file        SHA-256 of the file's size (8 bytes, little-endian) and the digests of its leaves, in order
    checkpoint  SHA-256 of one line for each file, in the order of their names: the file's digest in hexadecimal, two
                spaces, its name, a newline

Leaves are independent of each other, so neither the number of threads nor their order matters.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from quire.config.engine import QuireConfig
from quire.errors import CheckpointError
from quire.loader.weight_files import weight_files

LEAF_BYTES = 16 << 20
"""Also what each thread has mapped at a time. A multiple of every page size in use."""
MAX_THREADS = 8


class _Reading:
    """One file on its way through the digest."""

    def __init__(self, file: Path, pool: ThreadPoolExecutor) -> None:
        """Raises: OSError when it cannot be opened."""
        self.file = file
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(f"{file.name} is no regular file")
            self.stamp = _stamp(status)
            self._bytes = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if status.st_size else None
        finally:
            os.close(descriptor)
        self._size = len(self._bytes) if self._bytes is not None else 0
        self._leaves: list[Future[bytes]] = []
        if self._bytes is not None:
            self._leaves = [pool.submit(_leaf, self._bytes, start) for start in range(0, self._size, LEAF_BYTES)]

    def line(self) -> str:
        """The file's line in the checkpoint's digest; waits for the leaves."""
        root = hashlib.sha256(self._size.to_bytes(8, "little"))
        for leaf in self._leaves:
            root.update(leaf.result())
        return f"{root.hexdigest()}  {self.file.name}\n"


def _leaf(content: mmap.mmap, start: int) -> bytes:
    end = min(len(content), start + LEAF_BYTES)
    with memoryview(content)[start:end] as leaf:
        digest = hashlib.sha256(leaf).digest()
    content.madvise(mmap.MADV_DONTNEED, start, end - start)
    return digest


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """What differs when a file was replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class WeightsDigest:
    """The digest of the weights in a directory, begun at once in threads of its own."""

    def __init__(self, directory: Path, num_threads: int) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-digest")
        self._problem: OSError | None = None
        self._readings = self._read()

    def result(self) -> str:
        """The digest, in hexadecimal. Call it when the weights were read: it makes sure that they were these.

        Files that were touched meanwhile are digested again.

        Raises: CheckpointError when they cannot be read, or were changed between the digest and now.
        """
        digest = self._finish(self._readings)
        if not self._is_unchanged():
            self._readings = self._read()
            if self._finish(self._readings) != digest:
                raise CheckpointError(
                    f"the weights in {self._directory} were changed while they were read. Start again when they are "
                    "complete."
                )
        return digest

    def close(self) -> None:
        """End the threads and let the files go. Idempotent."""
        self._pool.shutdown(cancel_futures=True)
        self._readings = []

    def __enter__(self) -> WeightsDigest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> list[_Reading]:
        """Problems are kept for `result`: whoever reads the tensors says it better, and sooner."""
        try:
            return [_Reading(file, self._pool) for file in weight_files(self._directory)]
        except OSError as error:
            self._problem = error
            return []

    def _finish(self, readings: list[_Reading]) -> str:
        if self._problem is not None:
            raise CheckpointError(f"the weights in {self._directory} cannot be read: {self._problem}")
        lines = "".join(reading.line() for reading in readings)
        return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()

    def _is_unchanged(self) -> bool:
        stamps = {reading.file: reading.stamp for reading in self._readings}
        try:
            return stamps == {file: _stamp(os.stat(file)) for file in weight_files(self._directory)}
        except OSError:
            return False


@contextmanager
def digesting(config: QuireConfig) -> Iterator[Callable[[], str]]:
    """Digest the weights that `config` names while the block runs; what the block gets waits for the digest.

    One core is left to whoever imports torch. Weights made up by load_format "dummy" are a function of their seed.
    """
    if config.load_config.load_format == "dummy":
        yield lambda: f"dummy weights of seed {config.model_config.seed}"
        return
    spare_cores = config.device_config.capabilities.num_cores - 1
    with WeightsDigest(config.model_config.path, min(max(1, spare_cores), MAX_THREADS)) as digest:
        yield digest.result
