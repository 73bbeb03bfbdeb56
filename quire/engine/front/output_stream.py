"""`OutputStream`: outputs of one request on their way from the engine to its reader."""

from __future__ import annotations

import asyncio

from quire.outputs import RequestOutput
from quire.sampling_params import RequestOutputKind


class OutputStream:
    """Outputs of one request on their way to one reader; a slow reader gets them merged, so nothing piles up."""

    def __init__(self, core_id: str) -> None:
        self.core_id = core_id
        """What the core calls the request. An id of the user's may come again while the core still speaks of the
        request that had it before; this one never does."""
        self.kind = RequestOutputKind.CUMULATIVE
        self.aborted = False
        """abort() came while the prompt was being tokenised."""
        self.in_core = False
        """A core that has not ended was given the request."""
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        """The reader, while there is nothing to read."""

    def put(self, output: RequestOutput) -> None:
        """Hand over what is new."""
        if self._pending is not None and self.kind is RequestOutputKind.DELTA:
            self._pending = self._pending.merged(output)
        else:
            self._pending = output
        self._wake()

    def fail(self, error: Exception) -> None:
        """End with an error, after what has been put."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """What is new, as soon as there is something. Raises: what `fail` was given."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._pending = self._pending, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
