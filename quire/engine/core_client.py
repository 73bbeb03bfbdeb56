"""How a front talks to an EngineCore that steps by itself."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from quire.engine.engine_core import EngineCore
from quire.errors import EngineDeadError
from quire.log import get_logger
from quire.messages.output import EngineCoreOutputs
from quire.messages.request import AbortRequest, EngineCoreRequest

log = get_logger(__name__)

OnOutputs = Callable[[EngineCoreOutputs], None]
OnDeath = Callable[[EngineDeadError], None]


class CoreClient(Protocol):
    """Sends requests and aborts; outputs come back through a callback, from another thread."""

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""

    def abort(self, abort: AbortRequest) -> None:
        """Stop a request or a branch before the next step."""

    def close(self) -> None:
        """Stop the core; harmless when called again."""


class ThreadedCoreClient:
    """A core that steps in a thread of this process. The thread alone touches the core."""

    def __init__(self, core: EngineCore, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._commands: queue.SimpleQueue[EngineCoreRequest | AbortRequest | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-core", daemon=True)
        self._thread.start()

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request."""
        self._commands.put(request)

    def abort(self, abort: AbortRequest) -> None:
        """Stop a request or a branch before the next step."""
        self._commands.put(abort)

    def close(self) -> None:
        """Stop the thread and release the model."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                self._on_outputs(self._core.step())
        except Exception as error:
            log.exception("engine core died")
            self._on_death(EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}"))
        finally:
            self._core.close()

    def _obey(self) -> bool:
        """Carry out what has been asked; sleeps while there is nothing to do. False when told to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._core.has_work())
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, AbortRequest):
                self._core.abort(command)
            else:
                self._core.add(command)
