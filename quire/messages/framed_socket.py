"""`FramedSocket`: messages over a connected Unix socket, each with the descriptor that belongs to it.

A stream of bytes knows no messages. A frame may come in any number of pieces, and several may come at once. Open
descriptors (SCM_RIGHTS) arrive with the first byte of the `sendmsg` that carried them, so a frame with a descriptor
always begins a `sendmsg`, and the n-th descriptor belongs to the n-th frame that has one.

Any thread may send, and none ever waits for the other side: what the socket does not take is queued, and a thread that
lives as long as the queue writes it. Frames never interleave, because only one thread writes at a time.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from quire.messages.codec import Codec, FrameReader, MalformedFrame
from quire.utils.threads import start_essential

READ_BYTES = 1 << 18
MAX_UNSENT_BYTES = 64 << 20
"""When more than this is queued, a further message breaks the connection. One message may be longer."""
_MAX_DESCRIPTORS = 64
"""That one read can take; Linux gives those of one `sendmsg` at most."""
_CLOEXEC: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class FramedSocket:
    """One end of a connection. One thread receives; any thread sends."""

    def __init__(
        self,
        sock: socket.socket,
        codec: Codec,
        *,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        """Takes the socket over."""
        sock.setblocking(True)
        self._sock = sock
        self._codec = codec
        self._reader = FrameReader(codec)
        self._descriptors: deque[int] = deque()
        """Received, and not yet given out with their frames."""
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: deque[tuple[memoryview, int]] = deque()
        """What is left of each frame, and a duplicate of its descriptor or -1."""
        self._num_unsent_bytes = 0
        self._is_draining = False
        """A thread writes the queue."""
        self._is_closed = False
        self._failure: OSError | None = None
        self._drained = threading.Condition()

    def fileno(self) -> int:
        """The socket's descriptor, for polling; -1 once closed."""
        return self._sock.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that the other side's buffer has not taken."""
        return self._num_unsent_bytes

    @property
    def failure(self) -> OSError | None:
        """Why nothing can be sent any more: the other side is gone, or does not read."""
        return self._failure

    def send(self, message: object, descriptor: int = -1) -> None:
        """Send a message, with a duplicate of a descriptor if its kind has one. Never waits.

        Raises: OSError when the other side is gone or does not read; FrameTooLong.
        """
        assert (descriptor >= 0) == self._codec.has_descriptor(message), message
        frame = memoryview(self._codec.encode(message))
        with self._drained:
            self._check_can_send()
            self._unsent.append((frame, os.dup(descriptor) if descriptor >= 0 else -1))
            self._num_unsent_bytes += len(frame)
            if not self._is_draining:
                self._write_or_fail()
                self._is_draining = bool(self._unsent)
                if self._is_draining:
                    start_essential("quire-writer", self._drain)
            if self._failure is not None:
                raise self._failure

    def flush(self) -> None:
        """Wait until everything is sent or the other side is gone."""
        with self._drained:
            self._drained.wait_for(lambda: not self._unsent)

    def receive(self) -> list[tuple[Any, int]]:
        """The messages that one read completes, perhaps none, each with its own descriptor or -1; waits for bytes.

        Raises: EOFError when the other side is gone; OSError; MalformedFrame.
        """
        size = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        data, ancillary, flags, _ = self._sock.recvmsg(READ_BYTES, size, _CLOEXEC)
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._descriptors.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise MalformedFrame("descriptors were lost on their way; this process may have too many open")
        if not data:
            raise EOFError
        messages = [(message, self._descriptor_of(message)) for message in self._reader.feed(data)]
        if self._descriptors and not self._reader.has_part:
            raise MalformedFrame("a descriptor came without a frame that has one")
        return messages

    def messages(self) -> Iterator[tuple[Any, int]]:
        """All messages until the other side is gone; waits for them.

        Raises: MalformedFrame.
        """
        while True:
            try:
                received = self.receive()
            except (EOFError, OSError):
                return
            yield from received

    def close(self) -> None:
        """Close both directions and drop what is queued. Idempotent."""
        with self._drained:
            self._is_closed = True
            self._fail(BrokenPipeError("the connection was closed"))
            if not self._is_draining:  # else that thread closes it: it may be polling the descriptor
                self._sock.close()
            while self._descriptors:
                os.close(self._descriptors.popleft())

    def _descriptor_of(self, message: object) -> int:
        if not self._codec.has_descriptor(message):
            return -1
        if not self._descriptors:
            raise MalformedFrame(f"{type(message).__name__} came without its descriptor")
        return self._descriptors.popleft()

    def _check_can_send(self) -> None:
        if self._failure is None and self._num_unsent_bytes > self._max_unsent_bytes:
            self._fail(BrokenPipeError(f"{self._num_unsent_bytes} bytes were not read"))
        if self._failure is not None:
            raise self._failure

    def _write_or_fail(self) -> None:
        """Write what the socket takes."""
        try:
            while self._unsent:
                self._write_some()
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error)

    def _write_some(self) -> None:
        frame, descriptor = self._unsent[0]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        num_sent = self._sock.sendmsg([frame], rights, socket.MSG_DONTWAIT)
        if descriptor >= 0:  # went with the first byte
            os.close(descriptor)
        self._num_unsent_bytes -= num_sent
        if num_sent < len(frame):
            self._unsent[0] = frame[num_sent:], -1
        else:
            self._unsent.popleft()

    def _drain(self) -> None:
        """Write the queue as the other side reads; in a thread of its own that ends with the queue."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while True:
            poll.poll()
            with self._drained:
                self._write_or_fail()
                if not self._unsent:
                    self._is_draining = False
                    if self._is_closed:
                        self._sock.close()
                    self._drained.notify_all()
                    return

    def _fail(self, error: OSError) -> None:
        """Send nothing more. The socket is shut down, so that whoever receives sees the end."""
        self._failure = self._failure or error
        while self._unsent:
            _, descriptor = self._unsent.popleft()
            if descriptor >= 0:
                os.close(descriptor)
        self._num_unsent_bytes = 0
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._drained.notify_all()
