"""A server with the embedded model, for tests of deployment."""

from __future__ import annotations

from tests.server.conftest import engine_parts, loop, serve, server

__all__ = ["engine_parts", "loop", "serve", "server"]
