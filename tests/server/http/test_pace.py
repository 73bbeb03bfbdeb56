"""A transfer is given up for its own stand-still only, not for the event loop's."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
import uvloop

from quire.server.http.pace import Pace

WINDOW_S = 0.3


@pytest.mark.parametrize("comes", [True, False], ids=["bytes that wait", "nothing"])
def test_bytes_that_came_while_the_loop_stood_still_count(comes: bool) -> None:
    reader, writer = os.pipe()
    other_reader, other_writer = os.pipe()

    async def transfer() -> list[str]:
        loop, moved, events = asyncio.get_running_loop(), 0, []
        ended = loop.create_future()

        def receive() -> None:
            nonlocal moved
            moved += len(os.read(reader, 1000))
            events.append("received")

        def give_up() -> None:
            events.append("given up")
            ended.set_result(None)

        def stand_still() -> None:
            """As another connection's callback that takes long: whoever sends meanwhile is heard after the timers."""
            loop.remove_reader(other_reader)
            if comes:
                os.write(writer, bytes(1000))
            time.sleep(2 * WINDOW_S)

        loop.add_reader(reader, receive)
        loop.add_reader(other_reader, stand_still)
        pace = Pace(WINDOW_S, 1000, lambda: moved, give_up)
        pace.start()
        os.write(other_writer, b"x")
        await ended
        loop.remove_reader(reader)
        return events

    try:
        events = uvloop.run(transfer())
    finally:
        for end in (reader, writer, other_reader, other_writer):
            os.close(end)
    assert events == (["received", "given up"] if comes else ["given up"])
