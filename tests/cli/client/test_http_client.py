"""The client against servers that do not do what they should: each fault is an error of that request, in words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire.cli.bench.load import Record, send_one
from quire.cli.client.http_client import HttpClient

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TIMEOUT = 30


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def against(replies: list[bytes], use: Callable[[HttpClient], Coroutine[Any, Any, None]]) -> int:
    """Use a client of a server that answers each request with the next reply; the number of connections it took."""
    remaining = list(replies)
    num_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        try:
            while remaining:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0
                )
                await reader.readexactly(length)
                reply = remaining.pop(0)
                writer.write(reply)
                await writer.drain()
                if not reply.endswith(b"0\r\n\r\n"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with (
            asyncio.timeout(TIMEOUT),
            HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client,
        ):
            await use(client)
        server.close()
        await server.wait_closed()

    asyncio.run(main())
    return num_connections


TOKEN = chunk(b'data: {"choices": [{"text": "a"}]}\n\n')
END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
FAULTS = {
    "cut in the middle": (HEAD + TOKEN, "the server closed the connection"),
    "cut before the reply": (b"", "the server closed the connection"),
    "no HTTP": (b"SSH-2.0\r\n", "the server's reply cannot be read"),
    "no JSON": (HEAD + chunk(b"data: {\n\n") + END, "the server's reply cannot be read: "),
    "other JSON": (HEAD + chunk(b'data: {"choices": 5}\n\n') + END, "Expected `array`"),
    "error in the stream": (HEAD + TOKEN + chunk(b'data: {"error": {"message": "lost"}}\n\n') + END, "lost"),
    "nothing in the stream": (HEAD + END, "the stream ended without output"),
    "status": (b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nlater", "503 Busy: later"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_server_is_the_error_of_its_request(name: str) -> None:
    reply, message = FAULTS[name]

    async def use(client: HttpClient) -> None:
        record = Record()
        await send_one(client, "/v1/completions", b"{}", record)
        assert record.error is not None
        assert message in record.error

    against([reply], use)


def test_a_connection_is_used_again_until_the_server_closes_it() -> None:
    async def use(client: HttpClient) -> None:
        for _ in range(3):
            record = Record()
            await send_one(client, "/v1/completions", b"{}", record)
            assert (record.error, record.num_output_tokens, record.is_counted) == (None, 1, False)

    assert against([HEAD + TOKEN + END] * 3, use) == 1


def test_a_request_that_meets_an_idle_connection_being_closed_is_sent_again() -> None:
    async def use(client: HttpClient) -> None:
        for _ in range(2):
            record = Record()
            await send_one(client, "/v1/completions", b"{}", record)
            assert (record.error, record.num_output_tokens) == (None, 1)

    assert against([HEAD + TOKEN + END, b"", HEAD + TOKEN + END], use) == 2


def test_leaving_closes_the_connection() -> None:
    async def use(client: HttpClient) -> None:
        arrived = asyncio.Event()
        task = asyncio.create_task(client.post("/", {}, lambda data: arrived.set()))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await client.close()

    assert against([HEAD + TOKEN + b"10\r\n0\r\n\r\n"], use) == 1


def test_a_reply_that_no_parser_gets_through_is_an_error_of_the_connection() -> None:
    deep = b"[" * 200_000
    replies = [
        b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(deep)) + deep for status in (b"200 OK", b"500 No")
    ]

    async def use(client: HttpClient) -> None:
        with pytest.raises(ConnectionError, match="the server's reply is no JSON"):
            (await client.get("/")).json()
        assert (await client.get("/")).error.startswith("500 No: [[[")

    against(replies, use)
