"""`Preparations`: requests whose grammars are being compiled. They are queued, and start when that is done."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from functools import partial

from quire.core.sequence import SequenceGroup
from quire.executor.base import Executor
from quire.messages.request import EngineCoreRequest
from quire.structured.grammar import Grammar

PATIENCE_S = 0.01
"""While nobody else can run, this long is waited for a grammar before aborts and new requests are looked at."""


class Preparations:
    """Which requests wait for their grammars."""

    def __init__(self, groups: Mapping[str, SequenceGroup], executor: Executor) -> None:
        """`groups`: all unfinished requests."""
        self._groups = groups
        self._executor = executor
        self._ready: queue.SimpleQueue[SequenceGroup] = queue.SimpleQueue()
        """Filled by the threads that compile."""
        self._num_waiting = 0

    def add(self, request: EngineCoreRequest, grammar: Grammar) -> None:
        """Have the grammar of a queued request compiled."""
        group = self._groups[request.request_id]
        group.is_preparing = True
        self._num_waiting += 1
        self._executor.prepare_grammar(grammar).add_done_callback(partial(self._done, group))

    def let_start(self) -> bool:
        """Let those start whose grammars are there; whether any request can run, or could after a short while."""
        if not self._num_waiting:
            return True
        self._take()
        if self._num_waiting and self._all_wait():
            self._take(PATIENCE_S)
        return not self._all_wait()

    def _all_wait(self) -> bool:
        return bool(self._groups) and all(group.is_preparing for group in self._groups.values())

    def _take(self, timeout: float = 0.0) -> None:
        try:
            while True:
                self._ready.get(block=timeout > 0, timeout=timeout or None).is_preparing = False
                self._num_waiting -= 1
                timeout = 0.0
        except queue.Empty:
            pass

    def _done(self, group: SequenceGroup, _: object) -> None:
        self._ready.put(group)
