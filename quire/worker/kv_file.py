"""`FilePages`: slots in a file of a fixed size. A later engine of the same identity finds its pages.

The file begins with what it is for: engine, bytes of a page, number of slots. Then come the slots: a header, and the
page behind it. A header names all that its page depends on and ends with a digest of itself; it is written after the
page and taken away before the page is written again. So a process that is killed leaves either a whole page or none. A
system that crashes may leave parts, whose digests are wrong.

The file is read and written by calls, not mapped: a mapped page that is gone, because somebody truncated the file or
the disk failed, would end the process (SIGBUS). Read by a call, it is a page with a wrong digest.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from quire.config.memory.plan import gib
from quire.errors import ConfigError
from quire.messages.kv_tiers import ALIGNMENT, PageContent, header_bytes, slot_bytes
from quire.worker.kv_store import Page

NAME = "quire-kv-pages"
MAGIC = b"quireKV1"
_FILE = struct.Struct("<8s32sQQQ16s")
"""Magic, engine, bytes of a page, slots, tokens of a block, digest of all that."""
_HEADER = struct.Struct("<8s32sQQ16s16s16s")
"""Magic, engine, group, number of tokens, hash, parent's hash, digest of the page; then the tokens and a digest."""
_DIGEST_SIZE = 16


class FilePages:
    """Slots in a file of a directory that this engine has for itself as long as it lives."""

    def __init__(self, directory: Path, num_slots: int, *, page_bytes: int, block_size: int, engine: bytes) -> None:
        """Open the file or make it. Pages of an engine with another digest are dropped.

        Raises: ConfigError when the directory cannot be used, is used by another engine, or has no room.
        """
        self.num_slots = num_slots
        self._page_bytes, self._block_size, self._engine = page_bytes, block_size, engine
        self._slot_bytes = slot_bytes(page_bytes, block_size)
        self._fd = _open(directory, ALIGNMENT + num_slots * self._slot_bytes)
        self._room = np.empty(page_bytes, np.uint8)
        """The page that is written next."""
        self._reads = threading.local()
        """The page that each thread has read last."""
        self._held: dict[int, tuple[PageContent, bytes]] = {}
        self._is_open = True
        if self._is_mine():
            self._find()
            return
        try:
            self._start_anew()
        except OSError as error:
            self.close()
            raise _unusable(directory, error) from None

    def content(self, slot: int) -> PageContent | None:
        """See `Pages`."""
        held = self._held.get(slot)
        return None if held is None else held[0]

    def read(self, slot: int) -> Page:
        """See `Pages`; valid until the same thread reads the next one. What cannot be read is 0."""
        if not hasattr(self._reads, "page"):
            self._reads.page = np.empty(self._page_bytes, np.uint8)
        page: Page = self._reads.page
        num_read = self._read_into(page, self._begin_of(slot) + header_bytes(self._block_size))
        page[num_read:] = 0
        return page

    def digest(self, slot: int) -> bytes:
        """See `Pages`."""
        return self._held[slot][1]

    def begin(self, slot: int) -> Page:
        """See `Pages`. There is room for one page at a time."""
        self.forget(slot)
        return self._room

    def commit(self, slot: int, content: PageContent, digest: bytes) -> None:
        """See `Pages`. The magic word is written last. A page that cannot be written is not there."""
        header, begin = self._header(content, digest), self._begin_of(slot)
        with suppress(OSError):
            self._write(self._room.data, begin + header_bytes(self._block_size))
            self._write(header[len(MAGIC) :], begin + len(MAGIC))
            self._write(MAGIC, begin)
            self._held[slot] = content, digest

    def forget(self, slot: int) -> None:
        """See `Pages`. Where the header cannot be written, the page behind it cannot either, or has another digest."""
        self._held.pop(slot, None)
        with suppress(OSError):
            self._write(bytes(len(MAGIC)), self._begin_of(slot))

    def close(self) -> None:
        """See `Pages`. What is in the file stays there."""
        if self._is_open:
            self._is_open = False
            self._held.clear()
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        """Raises: OSError."""
        left = memoryview(data)
        while left:
            num_written = os.pwrite(self._fd, left, offset)
            left, offset = left[num_written:], offset + num_written

    def _read_into(self, page: Page, offset: int) -> int:
        """How many bytes could be read."""
        num_read = 0
        with suppress(OSError):
            while num_read < len(page):
                count = os.preadv(self._fd, [page[num_read:].data], offset + num_read)
                if not count:
                    break  # the file ends here
                num_read += count
        return num_read

    def _read(self, size: int, offset: int) -> bytes:
        """So many bytes, or as many as can be read."""
        found = np.empty(size, np.uint8)
        return found[: self._read_into(found, offset)].tobytes()

    def _begin_of(self, slot: int) -> int:
        return ALIGNMENT + slot * self._slot_bytes

    def _header(self, content: PageContent, digest: bytes) -> bytes:
        group, own, parent, tokens = content
        fields = _HEADER.pack(MAGIC, self._engine, group, len(tokens), own, parent, digest)
        fields += struct.pack(f"<{self._block_size}q", *tokens)
        return fields + xxhash.xxh3_128_digest(fields)

    def _parse(self, slot: int) -> tuple[PageContent, bytes] | None:
        """What a header says; None where it is not whole, or another engine's."""
        size = _HEADER.size + 8 * self._block_size
        raw = self._read(size + _DIGEST_SIZE, self._begin_of(slot))
        if len(raw) < size + _DIGEST_SIZE or not raw.startswith(MAGIC):
            return None
        _, engine, group, num_tokens, own, parent, digest = _HEADER.unpack_from(raw)
        if xxhash.xxh3_128_digest(raw[:size]) != raw[size:] or engine != self._engine or num_tokens != self._block_size:
            return None
        return (group, own, parent, struct.unpack_from(f"<{self._block_size}q", raw, _HEADER.size)), digest

    def _find(self) -> None:
        for slot in range(self.num_slots):
            held = self._parse(slot)
            if held is not None:
                self._held[slot] = held

    def _purpose(self) -> bytes:
        fields = _FILE.pack(MAGIC, self._engine, self._page_bytes, self.num_slots, self._block_size, b"")
        fields = fields[:-_DIGEST_SIZE]
        return fields + xxhash.xxh3_128_digest(fields)

    def _is_mine(self) -> bool:
        return self._read(_FILE.size, 0) == self._purpose()

    def _start_anew(self) -> None:
        self._write(bytes(_FILE.size), 0)
        for slot in range(self.num_slots):
            self.forget(slot)
        self._write(self._purpose(), 0)


def _open(directory: Path, num_bytes: int) -> int:
    """A descriptor of the locked file, which has its full size on the disk, so that no other file takes its room.

    Raises: ConfigError.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(directory)
        fd = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unusable(directory, error) from None
    try:
        _check_own(fd, directory)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
        _give_room(fd, num_bytes)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(
            f"kv_disk={str(directory)!r} is used by another engine. Give each engine a directory of its own."
        ) from None
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ConfigError(
                f"kv_disk={str(directory)!r} has no room for {gib(num_bytes)} ({os.strerror(error.errno)}). "
                "Lower kv_disk_size, or give a directory on a larger disk."
            ) from None
        raise _unusable(directory, error) from None
    except ConfigError:
        os.close(fd)
        raise
    return fd


def _give_room(fd: int, num_bytes: int) -> None:
    """Make the file as large as that, on the disk too, or leave it as it was.

    Raises: OSError.
    """
    before = os.fstat(fd).st_size
    _check_room(fd, num_bytes)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError:
        os.ftruncate(fd, before)
        raise


def _check_room(fd: int, num_bytes: int) -> None:
    """Before anything is allocated: some file systems do that by writing, until the disk is full.

    Raises: OSError.
    """
    disk = os.fstatvfs(fd)
    if num_bytes > disk.f_bavail * disk.f_frsize + 512 * os.fstat(fd).st_blocks:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _check_private(directory: Path) -> None:
    """Refuse a directory that others can read or write: keys and values tell about prompts.

    Raises: ConfigError.
    """
    status, others = directory.stat(), None
    if status.st_uid != os.geteuid():
        others = "it belongs to another user"
    elif status.st_mode & 0o077:
        others = f"its mode is {status.st_mode & 0o777:04o}, not 0700"
    if others is not None:
        raise ConfigError(
            f"kv_disk={str(directory)!r} must be a directory of this user that nobody else can use: {others}. "
            "Run chmod 700, or give a directory that does not exist yet."
        )


def _check_own(fd: int, directory: Path) -> None:
    """Refuse what another user or another name can reach, or is no file.

    Raises: ConfigError.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink != 1:
        raise ConfigError(
            f"kv_disk={str(directory)!r} holds {NAME!r}, which is no file of this user under that one name. Remove it, "
            "or give another directory."
        )


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"kv_disk={str(directory)!r} cannot be used: {error.strerror or error}. Give a directory that can be written."
    )
