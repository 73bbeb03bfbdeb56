"""How often a core process is replaced, and what counts as hanging."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.knobs import knob, read_knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When to give up on a core. Times are seconds.

    Raises: ConfigError.
    """

    max_engine_restarts: int = knob(5, "Times the engine process is replaced in a window before giving up.", least=0)
    engine_restart_window: int = knob(600, "The window in which replacements count.", least=1)
    step_timeout: int = knob(60, "A step that takes longer, and ten times the longest so far, hangs.", least=1)

    def __post_init__(self) -> None:
        read_knobs(self)
