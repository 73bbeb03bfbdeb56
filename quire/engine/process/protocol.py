"""What is said on the two kinds of socket around a core process.

*Control*, one per core, to whoever started it: configuration, readiness, heartbeats; and new connections, which travel
as open descriptors. *Data*, one per front: requests and aborts in, outputs out. Both are socket pairs: they have no
name that another process could connect to, and no file that could be left behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.config.engine import QuireConfig
from quire.config.flags.args import EngineArgs
from quire.engine.identity import Identity
from quire.messages.codec import Codec
from quire.messages.output import EngineCoreOutputs
from quire.messages.request import AbortRequest, EngineCoreRequest
from quire.messages.stats import Activity
from quire.structured.grammar import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class StartCore:
    """Supervisor -> core: decide the configuration and load."""

    args: EngineArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCore:
    """Supervisor -> core: load with the configuration that the first core decided; requests rely on it."""

    config: QuireConfig
    identity: Identity | None
    """What cores have computed so far; None when none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Supervisor -> core: the descriptor that comes with this message is a front's connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCore:
    """Supervisor -> core: write what is cached to the --kv-disk file, then exit."""

    flush_s: float
    """Seconds for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfigured:
    """Core -> supervisor -> fronts: the configuration is decided; loading has begun."""

    config: QuireConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreReady:
    """Core -> supervisor: steps can run."""

    identity: Identity
    stages: dict[str, float]
    """Where the start's seconds went."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Core -> supervisor, from a thread of its own: the process runs; how long its step takes, how far its start is."""

    step_s: float = 0.0
    longest_step_s: float = 0.0
    """Of those that ended."""
    stage: str = ""
    """Of the start; empty once steps can run."""
    progress: int = 0
    """Grows while a stage works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFailed:
    """Core -> supervisor, before it exits: an error as `QuireError.as_wire` writes it."""

    name: str
    fields: dict[str, Any]
    starting: bool
    """It happened before the core was ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWanted:
    """Core -> supervisor: write down what the flight recorder holds."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilityCall:
    """Front -> core: call one of the core's methods between two steps."""

    call_id: int
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilityResult:
    """Core -> front."""

    call_id: int
    error: str | None = None
    data: bytes = b""
    """What the method returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityCall:
    """Front -> core: say what a tenant's requests do, of all fronts together."""

    call_id: int
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityResult:
    """Core -> front."""

    call_id: int
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Core -> front: from now on only this request of yours runs, and nobody else's; None: no longer."""

    request_id: str | None


CONTROL = Codec(
    (StartCore, RestartCore, Attach, StopCore, CoreConfigured, CoreReady, Heartbeat, CoreFailed, TraceWanted), (Attach,)
)
DATA = Codec(
    (
        EngineCoreRequest,
        AbortRequest,
        UtilityCall,
        EngineCoreOutputs,
        UtilityResult,
        Trial,
        ActivityCall,
        ActivityResult,
        Vocabulary,
    )
)
