"""Frames and their descriptors over a socket: whole, in order, from any thread, and nobody waits for a reader."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.messages.codec import Codec, MalformedFrame
from quire.messages.framed_socket import FramedSocket

TIMEOUT = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    number: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Comes with a file that holds `number`."""

    number: int
    text: str = ""


CODEC = Codec((Plain, Opened), with_descriptor=(Opened,))


@pytest.fixture
def raw() -> Iterator[tuple[FramedSocket, socket.socket]]:
    """One end, and the bare socket that is the other."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(TIMEOUT)
    framed = FramedSocket(ours, CODEC)
    yield framed, theirs
    framed.close()
    theirs.close()


@pytest.fixture
def pair() -> Iterator[tuple[FramedSocket, FramedSocket]]:
    first, second = (FramedSocket(sock, CODEC) for sock in socket.socketpair())
    yield first, second
    first.close()
    second.close()


def opened(number: int) -> int:
    descriptor = os.memfd_create("number")
    os.write(descriptor, str(number).encode())
    return descriptor


def send(framed: FramedSocket, message: Plain | Opened) -> None:
    if isinstance(message, Plain):
        framed.send(message)
        return
    descriptor = opened(message.number)
    try:
        framed.send(message, descriptor)
    finally:
        os.close(descriptor)  # the caller's own


def check(message: Plain | Opened, descriptor: int) -> None:
    """A message has the descriptor that was sent with it, or none."""
    assert (descriptor >= 0) == isinstance(message, Opened)
    if descriptor >= 0:
        assert os.pread(descriptor, 100, 0) == str(message.number).encode()
        os.close(descriptor)


def take(framed: FramedSocket, count: int) -> list[Any]:
    """The next messages, their descriptors checked."""
    taken: list[Any] = []
    while len(taken) < count:
        for message, descriptor in framed.receive():
            check(message, descriptor)
            taken.append(message)
    return taken


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mixed(size: int) -> list[Plain | Opened]:
    return [kind(number=n, text="x" * size) for n, kind in enumerate((Plain, Opened, Plain, Opened, Opened))]


@pytest.mark.parametrize("piece", [1, 2, 5, 7, 1000])
def test_frames_may_come_in_any_pieces_and_keep_their_descriptors(
    raw: tuple[FramedSocket, socket.socket], piece: int
) -> None:
    framed, peer = raw
    taken = []
    for message in mixed(30):
        frame = CODEC.encode(message)
        rest = 0
        if isinstance(message, Opened):
            descriptor = opened(message.number)
            rest = socket.send_fds(peer, [frame[:piece]], [descriptor])
            os.close(descriptor)
        for start in range(rest, len(frame), piece):
            peer.send(frame[start : start + piece])
            taken += take(framed, 0 if start + piece < len(frame) else 1)
    rest = len(mixed(30)) - len(taken)
    assert taken + take(framed, rest) == mixed(30)


def test_frames_that_come_together_keep_their_descriptors(pair: tuple[FramedSocket, FramedSocket]) -> None:
    first, second = pair
    for message in mixed(10) * 20:
        send(first, message)
    assert take(second, 100) == mixed(10) * 20


@pytest.mark.parametrize("size", [350 << 10, 20 << 20])
def test_long_messages_cross_in_both_directions_and_no_sender_waits(
    pair: tuple[FramedSocket, FramedSocket], size: int
) -> None:
    first, second = pair
    messages = mixed(size)[:3]
    for framed in pair:
        for message in messages:
            send(framed, message)
    assert first.num_unsent_bytes > 0, "nobody has read, and both have sent"
    assert take(second, 3) == messages
    assert take(first, 3) == messages
    first.flush()
    assert first.num_unsent_bytes == 0


def test_frames_of_many_threads_never_interleave(pair: tuple[FramedSocket, FramedSocket]) -> None:
    first, second = pair
    before = num_descriptors()

    def run(writer: int) -> None:
        rng = random.Random(writer)
        for count in range(60):
            kind = rng.choice((Plain, Opened))
            send(first, kind(number=1000 * writer + count, text="x" * rng.choice((3, 3000, 300_000))))

    threads = [threading.Thread(target=run, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    numbers = [message.number for message in take(second, 8 * 60)]
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(numbers) == [1000 * writer + count for writer in range(8) for count in range(60)]
    for writer in range(8):
        mine = [number for number in numbers if number // 1000 == writer]
        assert mine == sorted(mine), "each thread's messages keep their order"
    first.flush()
    assert num_descriptors() == before


def test_a_reader_that_does_not_read_breaks_its_own_connection_at_the_bound() -> None:
    before = num_descriptors()
    ours, theirs = socket.socketpair()
    framed = FramedSocket(ours, CODEC, max_unsent_bytes=1 << 20)
    with theirs:
        framed.send(Plain(number=0, text="x" * (3 << 20)))  # one may be longer
        with pytest.raises(BrokenPipeError, match="bytes were not read"):
            send(framed, Opened(number=1))
        with pytest.raises(EOFError):  # whoever receives sees the end, too
            framed.receive()
        with pytest.raises(BrokenPipeError, match="bytes were not read"):
            framed.send(Plain(number=2))
        assert framed.num_unsent_bytes == 0
        framed.close()
    for thread in threading.enumerate():
        if thread.name == "quire-writer":
            thread.join(TIMEOUT)
    assert num_descriptors() == before


def test_what_the_other_side_said_before_it_went_can_still_be_read(pair: tuple[FramedSocket, FramedSocket]) -> None:
    first, second = pair
    send(first, Plain(number=1))
    send(first, Opened(number=2))
    first.flush()
    first.close()
    with pytest.raises(BrokenPipeError):
        second.send(Plain(number=3))
    assert take(second, 2) == [Plain(number=1), Opened(number=2)]
    with pytest.raises(EOFError):
        second.receive()
    assert list(second.messages()) == []


def test_what_is_queued_when_a_connection_is_closed_holds_nothing() -> None:
    before = num_descriptors()
    for _ in range(5):
        first, second = (FramedSocket(sock, CODEC) for sock in socket.socketpair())
        for _ in range(20):
            send(first, Opened(number=3, text="x" * 100_000))
        first.close()
        first.close()
        second.close()
    for thread in threading.enumerate():
        if thread.name == "quire-writer":
            thread.join(TIMEOUT)
    assert num_descriptors() == before


def test_a_descriptor_without_a_frame_and_a_frame_without_its_descriptor_are_malformed() -> None:
    for message, descriptors in ((Opened(number=1), 0), (Plain(number=1), 1)):
        ours, theirs = socket.socketpair()
        framed = FramedSocket(ours, CODEC)
        with theirs, open(os.devnull) as file:
            socket.send_fds(theirs, [CODEC.encode(message)], [file.fileno()] * descriptors)
            with pytest.raises(MalformedFrame, match="descriptor"):
                framed.receive()
        framed.close()
