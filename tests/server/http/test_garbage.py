"""A request leaves nothing that only the garbage collector could free: that would hold its body until it runs."""

from __future__ import annotations

import gc
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from quire import server
from tests.server.conftest import TIMEOUT

LARGE = "word " * 100_000
BODIES: dict[str, bytes] = {
    "answered": json.dumps({"prompt": "a", "max_tokens": 2}).encode(),
    "streamed": json.dumps({"prompt": "a", "max_tokens": 2, "stream": True}).encode(),
    "not JSON": b"[1,2" + b" " * 500_000,
    "too many values": b'{"prompt":[' + b"[]," * 200_000 + b"1]}",
    "not valid": json.dumps({"prompt": "a", "temperature": "x", "user": LARGE}).encode(),
    "too long": json.dumps({"prompt": LARGE}).encode(),
    "another model": json.dumps({"prompt": "a", "model": "x"}).encode(),
}
SERVER = str(Path(server.__file__).parent)


@pytest.fixture(scope="module")
def what_stands_already() -> None:
    """All that earlier tests imported: looking at it would take most of the time of each collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def garbage(what_stands_already: None) -> Iterator[list[Any]]:
    """What a collection finds instead of freeing it."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("kind", BODIES)
def test_a_request_leaves_no_garbage(serve: Any, garbage: list[Any], kind: str) -> None:
    headers = {"content-type": "application/json"}
    with serve() as running, httpx.Client(timeout=TIMEOUT, trust_env=False) as client:
        for _ in range(2):  # what is made once for all comes with the first
            gc.collect()
            garbage.clear()
            client.post(f"{running.url}/v1/completions", content=BODIES[kind], headers=headers)
            running.wait_idle()
        gc.collect()
        port = int(running.url.rpartition(":")[2])
        cycles = [item for item in garbage if isinstance(item, RequestResponseCycle)]
        frames = [item.f_code for item in garbage if isinstance(item, types.FrameType)]
        assert [cycle for cycle in cycles if cycle.scope["server"][1] == port] == []
        assert [code.co_qualname for code in frames if SERVER in code.co_filename] == []
