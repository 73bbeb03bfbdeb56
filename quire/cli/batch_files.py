"""The files of `quire run-batch`: requests streamed from one, replies appended to the other.

A reply is one line. Half a line (the process was killed, or the disk was full) is no reply and is cut off, so the file
can be used after an end at any byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from quire.cli.output import reason_of
from quire.errors import ConfigError

PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input file; of one that is too long only the beginning."""

    number: int
    data: bytes
    is_too_long: bool

    @property
    def custom_id(self) -> str | None:
        """Its custom_id, if it can be read."""
        if self.is_too_long:
            return None
        try:
            value = json.loads(self.data)
        except (ValueError, RecursionError):
            return None
        found = value.get("custom_id") if isinstance(value, dict) else None
        return found if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class Earlier:
    """The replies that the output file holds when a run begins."""

    custom_ids: dict[int, str | None]
    """By the number of the line."""
    failed: frozenset[int]
    num_bytes: int
    """Whole lines; what follows is half a line."""

    @property
    def succeeded(self) -> set[int]:
        """Numbers of the lines that need no other reply."""
        return self.custom_ids.keys() - self.failed


def open_input(name: str, flag: str = "--input-file") -> IO[bytes]:
    """The input file, which is read more than once; what comes through a pipe is stored first. `flag` named it.

    Raises: ConfigError.
    """
    try:
        file: IO[bytes] = open(name, "rb")  # noqa: SIM115 (the caller closes it)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            stored = tempfile.TemporaryFile()  # noqa: SIM115
            with file:
                shutil.copyfileobj(file, stored)
            return stored
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {name} cannot be read: {reason_of(error)}") from None
    return file


def read_lines(file: IO[bytes], max_bytes: int) -> Iterator[Line]:
    """Lines that hold something, one at a time. What exceeds `max_bytes` is skipped, not loaded."""
    file.seek(0)
    number = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        is_too_long = len(data) > max_bytes and not data.endswith(b"\n")
        rest = data
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(PIECE)
        if is_too_long or data.strip():
            yield Line(number, data, is_too_long)


def count_lines(file: IO[bytes], max_bytes: int, earlier: Earlier, args: argparse.Namespace) -> int:
    """How many lines hold something.

    Raises: ConfigError when there are none, or when earlier replies are to other requests.
    """
    count = num_known = 0
    for line in read_lines(file, max_bytes):
        count += 1
        if line.number in earlier.custom_ids:
            num_known += 1
            if earlier.custom_ids[line.number] != line.custom_id:
                raise _foreign(args.output_file)
    if num_known < len(earlier.custom_ids):
        raise _foreign(args.output_file)
    if not count:
        raise ConfigError(f"--input-file {args.input_file} holds no requests")
    return count


def read_earlier(name: str) -> Earlier:
    """What the output file holds.

    Raises: ConfigError when it holds anything but replies; OSError.
    """
    custom_ids: dict[int, str | None] = {}
    failed = set()
    num_bytes = 0
    with open(name, "rb") as file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            num_bytes += len(text)
            number, custom_id, succeeded = _read_reply(text, name)
            custom_ids[number] = custom_id
            if succeeded:
                failed.discard(number)
            else:
                failed.add(number)
    return Earlier(custom_ids, frozenset(failed), num_bytes)


def _read_reply(text: bytes, name: str) -> tuple[int, str | None, bool]:
    """(number of the line, its custom_id, whether it was answered with success)."""
    try:
        value: Any = json.loads(text)
        number = int(str(value["id"]).removeprefix("batch_req_"))
        response = value["response"]
        succeeded = value["error"] is None and response is not None and response["status_code"] == 200
        return number, value["custom_id"], succeeded
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _foreign(name) from None


def _foreign(output: str) -> ConfigError:
    return ConfigError(f"--output-file {output} does not answer this input file; name another one, or --overwrite it")


class ReplyFile:
    """The output file. After an error it holds whole replies only, as far as the system lets it."""

    def __init__(self, name: str, earlier: Earlier) -> None:
        """Raises: OSError."""
        path = Path(name).resolve()
        self._is_plain = path.is_file() or not path.exists()
        if self._is_plain and earlier.failed:
            _drop_failed(path, earlier.succeeded)
        self._file = open(path, "ab" if self._is_plain else "wb", buffering=0)  # noqa: SIM115 (a context manager itself)
        if self._is_plain:
            if not earlier.failed:
                self._file.truncate(earlier.num_bytes)
            self._num_bytes = self._file.seek(0, os.SEEK_END)

    def write(self, reply: dict[str, Any]) -> None:
        """Append one reply.

        Raises: OSError, and then nothing of it is in the file.
        """
        line = json.dumps(reply, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"  # JSON's own escapes
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._cut()
            raise
        if self._is_plain:
            self._num_bytes += len(line)

    def sync(self) -> None:
        """Have the disk hold what was written: some file systems notice only now that they are full.

        Raises: OSError.
        """
        if self._is_plain:
            os.fsync(self._file.fileno())

    def __enter__(self) -> ReplyFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _cut(self) -> None:
        if self._is_plain:
            self._file.truncate(self._num_bytes)


def _drop_failed(path: Path, numbers: set[int]) -> None:
    """Rewrite the file with the replies to these lines only. The old file stays until the new one is whole."""
    kept = path.with_name(f".{path.name}.{os.getpid()}")
    missing = set(numbers)
    try:
        with path.open("rb") as old, kept.open("wb") as new:
            for text in old:
                if not text.endswith(b"\n"):
                    break
                number, _, succeeded = _read_reply(text, str(path))
                if succeeded and number in missing:
                    missing.remove(number)
                    new.write(text)
            new.flush()
            os.fsync(new.fileno())
        shutil.copymode(path, kept)
        kept.replace(path)
    except BaseException:
        kept.unlink(missing_ok=True)
        raise
