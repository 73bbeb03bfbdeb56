"""Fields of a request that nothing here reads: those of forms, and what is said of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.errors import shown
from quire.server.http.errors import ApiError
from quire.server.service import Service
from quire.tokenizer.unread_fields import Unknown, unknown_in, warnings_of

OF_FORM = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema"),
}
OF_SCHEMA = ("name", "description", "schema", "strict")


def unknown_in_form(given: Mapping[str, Any] | None, place: str, *, is_flat: bool = False) -> list[Unknown]:
    """Those of a `response_format`; `is_flat`: the schema stands beside its type."""
    kind = None if given is None else given.get("type")
    if given is None or kind not in OF_FORM:
        return []
    if kind == "json_schema" and is_flat:
        return unknown_in(given, place, ("type", *OF_SCHEMA))
    inside = unknown_in(given.get("json_schema"), f"{place}.json_schema", OF_SCHEMA) if kind == "json_schema" else []
    return unknown_in(given, place, OF_FORM[kind]) + inside


def warn_of(unknown: Sequence[Unknown], service: Service, *, place_of: Callable[[str], str] | None = None) -> list[str]:
    """Warnings that name unknown fields inside of known ones; `place_of` makes a path the request's own.

    Raises: ApiError with --strict-params.
    """
    named = [field if place_of is None else field.at(place_of(field.path)) for field in unknown]
    if named and service.settings.strict_params:
        first = named[0]
        message = f"Unknown parameter: {shown(first.path)}{first.hint}."
        raise ApiError(400, "unsupported_parameter", message, param=first.path[:200])
    return warnings_of(named)
