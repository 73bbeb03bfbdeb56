"""`OngoingRequests`: the requests of one front from their arrival to their last output, whatever core they run in.

A core that ends takes no request with it: the next one gets each again, with the tokens it has. Knows no event loop and
no processes: `async_llm_engine` says which core there is, in the loop from which this is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from quire.engine.front.admission import Admission
from quire.engine.front.input_processor import ProcessedRequest
from quire.engine.front.output_processor import OutputProcessor
from quire.engine.front.output_stream import OutputStream
from quire.engine.process.client import CoreClient
from quire.engine.process.suspects import Suspects
from quire.engine.request_memory import RequestMemory
from quire.errors import EngineDeadError, RequestQuarantined
from quire.messages.output import EngineCoreOutputs
from quire.messages.request import AbortRequest
from quire.outputs import RequestOutput


class OngoingRequests:
    """Requests that have readers."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.memory = RequestMemory(0)
        """Of requests in the core; with its limit as soon as the configuration is known."""
        self.suspects = Suspects()
        self.core: CoreClient | None = None
        """Where they run; None while there is no core."""
        self.output_processor: OutputProcessor | None = None
        """None until the model is known."""
        self._streams: dict[str, OutputStream] = {}
        """By the user's request id."""
        self._readers: dict[str, OutputStream] = {}
        """By the core's request id; those whose request was given to the core."""
        self._ordinals = itertools.count()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[str]:
        """The users' request ids."""
        return iter(self._streams)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._streams

    def enter(self, request_id: str, tenant: str, num_sequences: int) -> OutputStream:
        """Admit a request: the stream of its outputs. Raises: EngineOverloaded."""
        stream = OutputStream(f"{request_id}#{next(self._ordinals)}")
        self.admission.enter(stream.core_id, tenant, num_sequences)
        self._streams[request_id] = stream
        return stream

    def start(self, stream: OutputStream, request: ProcessedRequest) -> None:
        """Give a request to the core, or keep it for the next one. Raises: EngineOverloaded."""
        self.admission.charge(stream.core_id, len(request.core.prompt_token_ids))
        self.memory.take(request.core)
        stream.kind = request.core.sampling_params.output_kind
        assert self.output_processor is not None
        self.output_processor.add(request)
        self._readers[stream.core_id] = stream
        if not stream.aborted:
            if self.core is not None:
                self.core.add(request.core)
                stream.in_core = True
            return
        output = self.output_processor.abort(stream.core_id)
        assert output is not None
        stream.put(output)

    def leave(self, request_id: str) -> None:
        """The reader has gone: stop the request."""
        self._stop(self._streams.pop(request_id))

    def abort(self, request_id: str) -> None:
        """Stop a request; its reader gets a last output with finish reason abort. Unknown ids are left alone."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.aborted = True
        output = self._stop(stream)
        if output is not None:
            stream.put(output)

    def deliver(self, news: EngineCoreOutputs) -> None:
        """Hand over to their readers what the core has made."""
        assert self.output_processor is not None
        outputs, aborts = self.output_processor.process(news)
        for abort in aborts:
            assert self.core is not None
            self.core.abort(abort)
        if self.admission or self.suspects:  # somebody has waited for a token
            for core_output in news.outputs:
                if core_output.new_token_ids:
                    self.admission.leave(core_output.request_id)
                    self.suspects.clear(core_output.request_id)
        for output in outputs:
            self._readers[output.request_id].put(output)

    def move_to(self, core: CoreClient) -> None:
        """Run in a new core: it gets every request with the tokens it has."""
        self.core = core
        for core_id, stream in self._readers.items():
            if self.output_processor is not None and core_id in self.output_processor:
                request = self.output_processor.so_far(core_id)
                core.add(replace(request, runs_alone=core_id in self.suspects))
                stream.in_core = True

    def core_ended(self, reason: str, *, crashed: bool) -> None:
        """A core has ended with the requests that it had. The one that is guilty of that fails."""
        bereft = [core_id for core_id, stream in self._readers.items() if stream.in_core]
        guilty = self.suspects.core_ended(bereft, crashed=crashed)
        if guilty in self._readers:
            stream = self._readers[guilty]
            self._stop(stream)
            stream.fail(
                RequestQuarantined(
                    f"this request is not run again: the engine ended whenever it ran it alone ({reason})"
                )
            )
        for stream in self._readers.values():
            stream.in_core = False

    def fail_all(self, why: str) -> None:
        """The engine has stopped for good."""
        for stream in self._streams.values():
            self._stop(stream)
            stream.fail(EngineDeadError(why))

    def _stop(self, stream: OutputStream) -> RequestOutput | None:
        """Take a request from the core; its last output, or None when it is not there (any more)."""
        self._readers.pop(stream.core_id, None)
        self.admission.leave(stream.core_id)
        self.memory.give_back(stream.core_id)
        self.suspects.clear(stream.core_id)
        output = None if self.output_processor is None else self.output_processor.abort(stream.core_id)
        if output is not None and self.core is not None:
            self.core.abort(AbortRequest(request_id=stream.core_id))
        return output
