"""Large replies are the same as small ones, written in pieces."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.server.http.replies import SEND_PIECE, PiecedReply, json_pieces, reply_of
from quire.server.http.streaming import Chunks, event, line
from quire.utils.work_pool import WorkPool
from tests.server.conftest import Running

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=40,
)


@given(VALUES)
def test_pieces_make_up_the_text(value: Any) -> None:
    assert b"".join(json_pieces(value)) == msgspec.json.encode(value)


@pytest.mark.parametrize(
    "write", [line, event, lambda data: event(data, "named"), lambda data: Chunks({"id": data["id"]}).event(data)]
)
def test_json_in_a_stream_is_one_line_to_every_client(write: Any) -> None:
    """Some end lines where Python's `splitlines` does: httpx's `iter_lines`, for one."""
    ends = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0x2028, 0x2029]))
    data = {"id": ends, "text": f"a{ends}b", "more": [ends]}
    last = write(data).decode().rstrip("\n").splitlines()[-1]
    assert json.loads(last.removeprefix("data: ")) == data


def test_a_list_of_any_length_is_cut() -> None:
    positions = [{"token": "a", "top_logprobs": [{"token": "b", "bytes": [1, 2]}] * 20}] * 1000
    for value in ({"choices": [{"logprobs": {"content": positions}}]}, list(range(100_000)), [None, *positions]):
        pieces = list(json_pieces(value))
        assert b"".join(pieces) == msgspec.json.encode(value)
        assert max(map(len, pieces)) < 2 * SEND_PIECE


def test_a_large_reply_is_sent_in_pieces_and_its_length_told() -> None:
    value = {"data": [{"n": index} for index in range(50_000)]}

    async def main() -> None:
        pool = WorkPool()
        reply = await reply_of(pool, lambda: value, 50_000)
        assert isinstance(reply, PiecedReply)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError

        await reply({"type": "http"}, receive, send)
        bodies = [message["body"] for message in sent[1:]]
        assert json.loads(b"".join(bodies)) == value
        assert max(map(len, bodies)) < 2 * SEND_PIECE
        assert [more["more_body"] for more in sent[1:]] == [True] * (len(bodies) - 1) + [False]
        assert dict(sent[0]["headers"])[b"content-length"] == str(sum(map(len, bodies))).encode()
        pool.close()

    asyncio.run(main())


def test_large_replies_have_what_small_ones_have(server: Running) -> None:
    given = {"max_tokens": 2, "echo": True, "logprobs": 3, "temperature": 0}
    short = server.post("/v1/completions", prompt=[5] * 10, **given).json()["choices"][0]["logprobs"]
    long = server.post("/v1/completions", prompt=[5] * 900, **given).json()["choices"][0]["logprobs"]
    assert long["tokens"][:10] == short["tokens"][:10]
    assert long["token_logprobs"][:10] == short["token_logprobs"][:10]
    assert long["top_logprobs"][:10] == short["top_logprobs"][:10]
    assert len(long["tokens"]) == 902
    with server.client.stream("POST", "/v1/completions", json={"prompt": [5] * 900, **given, "stream": True}) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    streamed = [top for event in events for top in event["choices"][0]["logprobs"]["top_logprobs"]]
    assert streamed == long["top_logprobs"]
