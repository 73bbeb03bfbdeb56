"""The platform of this process."""

from __future__ import annotations

from functools import cache
from typing import cast

from quire.config.engine import Capabilities
from quire.utils.lazy import LazyTable

PLATFORMS = LazyTable("platform", {"cpu": "quire.platforms.cpu:capabilities"})


@cache
def current_capabilities() -> Capabilities:
    """What this machine offers; measured once."""
    measure = PLATFORMS.load("cpu")
    assert callable(measure)
    return cast(Capabilities, measure())
