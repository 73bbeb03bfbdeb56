"""The platform of an engine: the one that is asked for, or the best that is here."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from quire.config.engine import Capabilities
from quire.errors import ConfigError
from quire.log import get_logger
from quire.platforms.platform import Platform
from quire.utils.lazy import LazyTable

log = get_logger(__name__)

GROUP = "quire.platforms"
"""Of entry points that name a `Platform`."""
PLATFORMS = LazyTable(
    "device",
    {
        "cuda": "quire.platforms.cuda:PLATFORM",
        "rocm": "quire.platforms.rocm:PLATFORM",
        "cpu": "quire.platforms.cpu:PLATFORM",
    },
)
"""The first one that can run something, and has no caveat, is used; those of other packages come before."""


@cache
def current_capabilities(device: str = "auto") -> Capabilities:
    """What a kind of device offers here; measured once.

    Raises: ConfigError for one that is not known, or cannot run anything here.
    """
    if device != "auto":
        platform = _platform(device)
        reason = platform.why_not()
        if reason is not None:
            raise ConfigError(f"device={device!r} cannot be used: {reason}")
        return platform.capabilities()
    for name in known_devices():
        platform = _platform(name)
        reason = platform.why_not()
        caveat = "" if reason else platform.caveat()
        if reason is None and not caveat:
            return platform.capabilities()
        if platform.is_present():
            why = reason or f"ask for it (device={name!r}); {caveat}"
            log.warning("device %s is here and is not used: %s", name, why)
    raise AssertionError("there is always a CPU")


def known_devices() -> tuple[str, ...]:
    """Names, the best first; the CPU, which is always there, comes last."""
    plugged = tuple(sorted(entry_points(group=GROUP).names - set(PLATFORMS)))
    return plugged + tuple(PLATFORMS)


def devices() -> dict[str, str]:
    """For people: each kind of device, and whether it can be used."""
    return {name: _state(_platform(name)) for name in known_devices()}


def _state(platform: Platform) -> str:
    if reason := platform.why_not():
        return reason
    caveat = platform.caveat()
    return f"can be asked for; {caveat}" if caveat else "can be used"


def _platform(name: str) -> Platform:
    plugged = () if name in PLATFORMS else entry_points(group=GROUP, name=name)
    found = next((point.load() for point in plugged), None) or PLATFORMS.load(name)
    if not isinstance(found, Platform):
        raise ConfigError(f"device={name!r}: its entry point in {GROUP} is no quire.platforms.platform.Platform")
    return found
