"""Messages as bytes: a frame is its length, its kind and msgpack of one dataclass.

Typed and bounded: what does not decode to the dataclass that its kind names is refused, and nothing that is decoded can
run code. Knows no sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.messages.variants import Variants

MAX_FRAME_BYTES = 256 << 20
"""A longer frame is a mistake, or outputs that must be sent one by one."""
_HEADER = struct.Struct(">IB")
"""Bytes of the body, kind."""


class MalformedFrame(Exception):
    """Bytes that are no message; whoever sent them cannot be understood any more."""


class FrameTooLong(Exception):
    """A message whose frame would exceed `MAX_FRAME_BYTES`."""


class Codec:
    """The messages that may travel on one kind of connection; a kind's number is its place in the list.

    Each message of a kind in `with_descriptor` comes with one open descriptor, other messages with none.
    """

    def __init__(self, kinds: Sequence[type], with_descriptor: Sequence[type] = ()) -> None:
        self._with_descriptor = frozenset(with_descriptor)
        self._numbers = {kind: number for number, kind in enumerate(kinds)}
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgspec.msgpack.Decoder(kind, dec_hook=_from_plain) for kind in kinds
        ]
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_as_plain)

    def has_descriptor(self, message: object) -> bool:
        """Whether an open descriptor comes with a message of this kind."""
        return type(message) in self._with_descriptor

    def encode(self, message: object) -> bytearray:
        """The frame of a message.

        Raises: FrameTooLong.
        """
        frame = bytearray(64)
        self._encoder.encode_into(message, frame, _HEADER.size)
        size = len(frame) - _HEADER.size
        if size > MAX_FRAME_BYTES:
            raise FrameTooLong(f"{type(message).__name__} of {size} bytes")
        _HEADER.pack_into(frame, 0, size, self._numbers[type(message)])
        return frame

    def decode(self, number: int, body: memoryview) -> Any:
        """The message in a frame's body.

        Raises: MalformedFrame.
        """
        if number >= len(self._decoders):
            raise MalformedFrame(f"kind {number} of {len(self._decoders)}")
        try:
            return self._decoders[number].decode(body)
        except (msgspec.MsgspecError, QuireError, TypeError, ValueError, NotImplementedError) as error:
            raise MalformedFrame(f"{type(error).__name__}: {error}") from None


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self, codec: Codec, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._codec = codec
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def has_part(self) -> bool:
        """Whether a frame has begun and not ended."""
        return bool(self._buffer)

    def feed(self, data: bytes | bytearray) -> Iterator[Any]:
        """The messages that these bytes complete.

        Raises: MalformedFrame; the rest of the stream has no meaning then.
        """
        buffer = self._buffer
        buffer += data
        start, end = 0, len(buffer)
        try:
            with memoryview(buffer) as view:
                while end - start >= _HEADER.size:
                    size, number = _HEADER.unpack_from(view, start)
                    if size > self._max_frame_bytes:
                        raise MalformedFrame(f"a frame of {size} bytes, the limit is {self._max_frame_bytes}")
                    stop = start + _HEADER.size + size
                    if stop > end:
                        break
                    with view[start + _HEADER.size : stop] as body:
                        message = self._codec.decode(number, body)
                    start = stop
                    yield message
        finally:
            del buffer[:start]


def _as_plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} cannot cross processes")


def _from_plain(kind: type, value: object) -> object:
    if issubclass(kind, Path):
        return kind(str(value))
    if issubclass(kind, Variants):
        variant: object = msgspec.convert(value, kind.kind_of(value))
        return variant
    raise NotImplementedError(f"{kind.__name__} cannot cross processes")
