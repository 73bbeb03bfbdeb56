"""What the bodies of all requests in progress may take of this process's memory."""

from __future__ import annotations

from starlette.types import Scope

from quire.server.http.errors import ApiError

_CHARGE = "quire.body_bytes"
"""In a scope: what its request has been charged."""


class BodyBudget:
    """Bytes of bodies, and of the values read from them, counted until their requests are answered."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def charge(self, scope: Scope, num_bytes: int) -> None:
        """Count bytes for a request until `release`.

        Raises: ApiError 503 when all requests together would exceed the limit.
        """
        if self.used + num_bytes > self.limit:
            raise ApiError(
                503,
                "server_overloaded",
                f"The bodies of all requests in progress take {self.used} bytes; with this one they would exceed "
                f"{self.limit}, the limit. Try again.",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        self.used += num_bytes
        scope[_CHARGE] = scope.get(_CHARGE, 0) + num_bytes

    def release(self, scope: Scope) -> None:
        """Give back what a request was charged. Idempotent."""
        self.used -= scope.pop(_CHARGE, 0)
