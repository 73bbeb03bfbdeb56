"""The server and the browser of the walks."""

from __future__ import annotations

from tests.server.conftest import engine_parts, loop, serve, server
from tests.server.test_console import browser, page

__all__ = ["browser", "engine_parts", "loop", "page", "serve", "server"]
