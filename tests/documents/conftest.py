"""The server that documents speak of."""

from __future__ import annotations

from tests.server.conftest import engine_parts, loop, serve, server

__all__ = ["engine_parts", "loop", "serve", "server"]
