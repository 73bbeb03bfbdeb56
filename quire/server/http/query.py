"""Query parameters: those that a route has, and those by which clients say which API they speak."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastapi import Request

from quire.errors import shown
from quire.server.http.errors import invalid

CLIENTS_OWN: Mapping[str, str | None] = {"api-version": None, "beta": "true", "client_version": None}
"""What clients add to every route, with the one value that they send: Azure's (api-version), Anthropic's for its
`beta` methods, Codex (client_version). None of them changes what a request means here."""
PROBES = ("/", "/health", "/ready", "/ping")
"""Routes that balancers ask with a query of their own. There is nothing to ask for."""


def check_query(request: Request, path: str, names: Collection[str]) -> None:
    """Refuse query parameters that a route does not have, or that come twice.

    Raises: ApiError 400.
    """
    if path in PROBES:
        return
    given = request.query_params.multi_items()
    counts = [name for name, _ in given]
    for name, value in given:
        if name not in names and not _is_clients_own(name, value):
            has = f"it has {', '.join(names)}" if names else "it has none"
            raise invalid("query", f"{shown(name)} is no query parameter of this route; {has}.")
        if counts.count(name) > 1:
            raise invalid(name, f"{name} is given {counts.count(name)} times; give it once.")


def _is_clients_own(name: str, value: str) -> bool:
    return name in CLIENTS_OWN and CLIENTS_OWN[name] in (None, value)
