"""`LLMEngine`: add requests, step, abort; synchronous and in this process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from quire.config.flags.args import EngineArgs
from quire.config.flags.foreign import ENGINE_METHODS, raise_no_attribute, refuse_foreign
from quire.engine.front.input_processor import as_params, check_request_id
from quire.engine.startup import EngineParts, start
from quire.errors import InvalidParameter, shown
from quire.inputs import PromptType
from quire.messages.request import AbortRequest
from quire.messages.stats import StepStats
from quire.outputs import RequestOutput
from quire.sampling_params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.interrupts import interrupts_deferred


class LLMEngine:
    """One engine, driven by calls to `step`."""

    def __init__(self, parts: EngineParts) -> None:
        self.parts = parts
        self.config = parts.config
        self.identity = parts.core.identity
        """What this engine computes."""
        self.tokenizer: Tokenizer | None = parts.tokenizer
        self.last_stats: StepStats | None = None
        """How full the engine was after the last step; None when statistics are off."""

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLMEngine:
        """Load the model and make ready.

        Raises: ConfigError and its kin.
        """
        engine = cls(start(args))
        engine.capture_graphs()  # nobody steps between two calls
        return engine

    def capture_graphs(self) -> None:
        """Capture what steps of several sequences are replayed from, on a device that captures: some seconds, once.

        Only before the requests that are queued are stepped.
        """
        while self.parts.core.capture_graph():
            pass

    @property
    def default_params(self) -> SamplingParams:
        """What a request without sampling parameters gets."""
        return self.parts.input_processor.default_params

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | Mapping[str, Any] | None = None,
        arrival_time: None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        priority: int = 0,
    ) -> None:
        """Validate and queue a request.

        `priority` counts with `scheduling_policy="priority"`: lower ones are served first. What else follows `params`
        is vLLM's, and only the defaults are taken.

        Raises: RequestError; nothing has happened then.
        """
        refuse_foreign(
            {
                "arrival_time": arrival_time,
                "lora_request": lora_request,
                "tokenization_kwargs": tokenization_kwargs,
                "trace_headers": trace_headers,
            }
        )
        check_request_id(request_id, self.parts.output_processor)
        with interrupts_deferred():
            request = self.parts.input_processor.process(request_id, prompt, as_params(params), priority=priority)
            self.parts.output_processor.add(request)
            if request.core.grammar is not None:
                self.parts.core.use_vocabulary(self.parts.input_processor.grammars.vocabulary())
            self.parts.core.add(request.core)

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of requests that have something new. A Ctrl-C waits for its end."""
        with interrupts_deferred():
            news = self.parts.core.step()
            self.last_stats = news.stats
            outputs, aborts = self.parts.output_processor.process(news)
            for abort in aborts:
                self.parts.core.abort(abort)
        return outputs

    def abort_request(self, request_ids: str | Collection[str]) -> list[RequestOutput]:
        """Stop requests at once; their last outputs. Unknown ids are left alone: they may just have finished.

        Raises: InvalidParameter for what is no id.
        """
        outputs = []
        with interrupts_deferred():
            for request_id in _listed(request_ids):
                self.parts.core.abort(AbortRequest(request_id=request_id))
                output = self.parts.output_processor.abort(request_id)
                if output is not None:
                    outputs.append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.parts.core.has_work()

    def get_num_unfinished_requests(self) -> int:
        """Requests that are queued or running."""
        return len(self.parts.output_processor)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        self.parts.core.reset_prefix_cache()
        return True

    def close(self) -> None:
        """Release model and cache; harmless when called again."""
        self.parts.core.close()
        self.parts.input_processor.grammars.close()

    if not TYPE_CHECKING:  # type checkers refuse what is not there by themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise_no_attribute(self, name, ENGINE_METHODS)

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listed(request_ids: object) -> list[str]:
    """One id or several as a list."""
    listed = [request_ids] if isinstance(request_ids, str) else request_ids
    ids = [item for item in listed if isinstance(item, str)] if isinstance(listed, Collection) else []
    if not isinstance(listed, Collection) or len(ids) != len(listed):
        raise InvalidParameter(
            f"request_ids must be a string or a list of strings, got {shown(request_ids)}", parameter="request_ids"
        )
    return ids
