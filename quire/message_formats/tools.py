"""`Tool`: a function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, and the JSON Schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    """Where its schema stands in a request, for messages."""
    strict: bool | None = None
    """True: calls always follow the schema, or the request is refused. False: calls are only read. None: calls follow
    as much of the schema as can be kept."""
