"""What an engine asks of a platform; a package brings its own with an entry point in the group `quire.platforms`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.config.engine import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A kind of device."""

    why_not: Callable[[], str | None]
    """Why nothing can run there now, with what to do; None if it can. Called before torch is imported, and cheap."""
    capabilities: Callable[[], Capabilities]
    """The facts, asked once and only where `why_not` gives None."""
    caveat: Callable[[], str] = lambda: ""
    """Why it is used only when asked for; empty for one that is used by itself. Asked where `why_not` gives None."""
    is_present: Callable[[], bool] = lambda: False
    """Whether such a device is here, though it may not be usable: then people are told why it is passed over."""
