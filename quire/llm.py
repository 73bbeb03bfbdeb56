"""`LLM`: offline generation, all prompts at once."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from quire.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from quire.config.flags.args import EngineArgs
from quire.config.flags.foreign import METHODS, raise_no_attribute, refuse_foreign
from quire.config.flags.knobs import signature_of
from quire.config.flags.options import EngineOptions
from quire.core.beam import score_of
from quire.engine.front.input_processor import as_params
from quire.engine.llm_engine import LLMEngine
from quire.engine.receipt import Receipt, Transcript, receipt_of
from quire.engine.startup import start
from quire.errors import EngineError, InvalidParameter, RequestError, UnsupportedFeature, counted, shown
from quire.inputs import ChatMessage, PromptType, TokensPrompt
from quire.log import get_logger
from quire.observability.chrome_trace import Trace, chrome_trace, encoded
from quire.observability.progress import generate_progress
from quire.outputs import RequestOutput
from quire.sampling_params import FIELD_NAMES, RequestOutputKind, SamplingParams
from quire.tokenizer.chat import ChatTemplate, checked_template_kwargs, has_chat_template, load_chat_template
from quire.tokenizer.chat import chat_prompt as render_chat
from quire.tokenizer.template_doctor import dropped_parts, parts_of
from quire.tokenizer.tokenizer import Tokenizer
from quire.tokenizer.unread_fields import unknown_in_messages, warnings_of
from quire.utils.call_names import checked_call

log = get_logger(__name__)

ParamsLike = SamplingParams | Mapping[str, Any]
MessageLike = ChatMessage | Mapping[str, Any]
"""A plain dict is what type checkers make of a message that is written out."""


def _place_of(name: str) -> str:
    """Where a keyword belongs that `generate` and `chat` do not have."""
    if name == "prompt_token_ids":
        return "token ids are prompts, too: generate([[1, 2, 3]]), or generate({'prompt_token_ids': [1, 2, 3]})"
    return f"give it as sampling_params=SamplingParams({name}=...)" if name in FIELD_NAMES else ""


def _place_of_beam(name: str) -> str:
    names = [each.name for each in dataclasses.fields(BeamSearchParams)]
    return f"give it as params=BeamSearchParams({name}=...)" if name in names else _place_of(name)


class LLM:
    """A model, ready to generate. It may be called from several threads: one call runs after the other.

    `model` is a directory, a hub id or a short name; without one the embedded model is used. Every option of
    `EngineArgs` is a keyword; unknown ones are errors.

    Raises: ConfigError and its kin, naming the option or file, what is wrong and the remedy.
    """

    def __init__(self, model: str | None = None, **options: Unpack[EngineOptions]) -> None:
        self._use(LLMEngine(start(EngineArgs.from_options({"model": model, **options}))))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """Build from arguments that were parsed elsewhere."""
        llm = cls.__new__(cls)
        llm._use(LLMEngine(start(args)))
        return llm

    def _use(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._templates: dict[tuple[str | None, bool], ChatTemplate] = {}
        self._turn = threading.RLock()
        """Held by the call whose requests run. Calls of other threads wait for it."""

    @checked_call("generate", _place_of)
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the outputs come in the order of the prompts.

        One set of sampling parameters serves all prompts, or give one for each; None takes the model's defaults. A
        request that fails while it runs ends with finish reason `error` and says why in `warnings`; the others go on.
        Nothing runs unless every prompt and every parameter is valid. `priority`, one for each prompt, counts with
        `scheduling_policy="priority"`: lower ones are served first. `lora_request` and `tokenization_kwargs` are
        vLLM's, and only None is taken.

        Raises: RequestError naming prompt, field and remedy.
        """
        refuse_foreign({"lora_request": lora_request, "tokenization_kwargs": tokenization_kwargs})
        items = _as_prompts(prompts)
        priorities = _priorities(priority, len(items))
        return self._run(items, _for_each(sampling_params, len(items)), priorities, use_tqdm)

    @checked_call("chat", _place_of)
    def chat(
        self,
        messages: Sequence[MessageLike] | Sequence[Sequence[MessageLike]],
        sampling_params: ParamsLike | Sequence[ParamsLike] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        lora_request: None = None,
        chat_template_content_format: str = "auto",
        mm_processor_kwargs: None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them.

        `tools` go to the chat template; calls in the answer are not parsed. `priority`, one for each conversation, as
        in `generate`. The last three are vLLM's, and only their defaults are taken.

        Raises: RequestError, also when the model has no chat template, or one that does not read `tools`.
        """
        refuse_foreign(
            {
                "lora_request": lora_request,
                "chat_template_content_format": chat_template_content_format,
                "mm_processor_kwargs": mm_processor_kwargs,
            }
        )
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidParameter(
                'messages must be a list such as [{"role": "user", "content": "Hello"}], and not empty',
                parameter="messages",
            )
        conversations = messages if isinstance(messages[0], (list, tuple)) else [messages]
        prompts: list[PromptType] = []
        warnings: dict[str, None] = {}
        for index, conversation in enumerate(conversations):
            with _named(f"conversation {index}", among=len(conversations)):
                prompt, noted = self._chat_prompt(
                    conversation,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    chat_template_kwargs=chat_template_kwargs,
                )
                prompts.append(prompt)
                warnings.update(dict.fromkeys(noted))
        for warning in warnings:
            log.warning("%s", warning)
        priorities = _priorities(priority, len(prompts))
        return self._run(prompts, _for_each(sampling_params, len(prompts)), priorities, use_tqdm)

    @checked_call("beam_search", _place_of_beam)
    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams | Mapping[str, Any],
        *,
        lora_request: None = None,
        use_tqdm: bool = False,
        concurrency_limit: None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most likely completions of prompts; the outputs come in the order of the prompts.

        Order and scores are those of `generate(num_beams=...)` in transformers. The model's own sampling defaults have
        no part in it. `lora_request` and `concurrency_limit` are vLLM's, and only None is taken.

        Raises: RequestError naming prompt, field and remedy; EngineError when a search fails while it runs.
        """
        refuse_foreign({"lora_request": lora_request, "concurrency_limit": concurrency_limit})
        given = _as_beam_params(params)
        items = _as_prompts(prompts)
        outputs = self._run(items, [given.sampling_params()] * len(items), [0] * len(items), use_tqdm)
        return [self._beams(output, given) for output in outputs]

    def _beams(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        if output.failure is not None:
            raise EngineError(output.failure.message)
        tokenizer, sequences = self.engine.tokenizer, []
        for found in output.outputs:
            tokens, cum_logprob = [*output.prompt_token_ids, *found.token_ids], found.cumulative_logprob
            assert cum_logprob is not None
            assert found.logprobs is not None
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    logprobs=found.logprobs,
                    cum_logprob=cum_logprob,
                    score=score_of(cum_logprob, len(found.token_ids), params.length_penalty),
                    text=None
                    if tokenizer is None
                    else tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens),
                    finish_reason=found.finish_reason,
                    stop_reason=found.stop_reason,
                )
            )
        return BeamSearchOutput(sequences)

    def chat_prompt(
        self,
        messages: Sequence[MessageLike],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokensPrompt:
        """The prompt that a conversation becomes through the model's chat template. The log says what has no effect.

        Raises: RequestError, also when the model has no chat template.
        """
        prompt, warnings = self._chat_prompt(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        for warning in warnings:
            log.warning("%s", warning)
        return prompt

    def _chat_prompt(
        self,
        messages: Sequence[MessageLike],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> tuple[TokensPrompt, list[str]]:
        """The same, and what has no effect."""
        _check_bool(add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message)
        template = self._template(chat_template, with_tools=bool(tools))
        kwargs = checked_template_kwargs(chat_template_kwargs)
        text, token_ids = render_chat(
            template,
            self.get_tokenizer(),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **kwargs,
        )
        if tools and "tools" not in template.names:
            raise UnsupportedFeature(
                "tools: the chat template of this model does not read them, so the model would never see them. Use a "
                "model made for tools, or give a chat_template that does.",
                parameter="tools",
            )
        parts = parts_of(messages, has_tools=bool(tools))
        lost = parts & dropped_parts(template) if parts else parts
        warnings = [
            *warnings_of(unknown_in_messages(messages, template)),
            *(f"messages: the chat template leaves out {part}, so the model never sees them" for part in sorted(lost)),
            *(
                f"chat_template_kwargs: the template does not read {shown(name)}; it has no effect"
                for name in sorted(kwargs.keys() - template.names)
            ),
        ]
        return {"prompt": text, "prompt_token_ids": token_ids}, warnings

    def receipt(
        self, outputs: RequestOutput | Sequence[RequestOutput], sampling_params: ParamsLike | None = None
    ) -> Receipt:
        """What `quire replay` needs to give finished outputs again; `sampling_params` as they were generated with."""
        params = (as_params(sampling_params) or self.engine.default_params).clone(
            output_kind=RequestOutputKind.FINAL_ONLY
        )
        transcripts = []
        for output in [outputs] if isinstance(outputs, RequestOutput) else outputs:
            if not isinstance(output, RequestOutput):
                raise InvalidParameter(
                    f"a receipt is made of RequestOutputs, got {type(output).__name__}; a beam search has them as "
                    "generate(..., SamplingParams(use_beam_search=True, temperature=0, n=...))",
                    parameter="outputs",
                )
            transcripts.append(Transcript(params))
            transcripts[-1].add(output)
        return receipt_of(self.engine.identity, transcripts)

    def trace(self, path: str | os.PathLike[str] | None = None) -> Trace:
        """The last steps and their requests in Chrome's trace format; with `path`, also written there.

        ui.perfetto.dev opens the file. It holds ids, counts and times, no text.
        """
        trace = chrome_trace(self.engine.parts.core.recording(), now=time.monotonic())
        if path is not None:
            Path(path).write_bytes(b"".join(encoded(trace)))
        return trace

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises: UnsupportedFeature when the engine runs without one.
        """
        if self.engine.tokenizer is None:
            raise UnsupportedFeature("this engine runs with skip_tokenizer_init=True", parameter="skip_tokenizer_init")
        return self.engine.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` has a template to use: the model's own, or the one of `LLM(chat_template=...)`."""
        return has_chat_template(self.engine.tokenizer, self.engine.config.model_config.chat_template)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from generation_config.json."""
        return self.engine.default_params

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        with self._turn:
            return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Release model and cache; harmless when called again."""
        with self._turn:
            self.engine.close()

    if not TYPE_CHECKING:  # type checkers refuse what is not there by themselves

        def __getattr__(self, name: str) -> NoReturn:
            raise_no_attribute(self, name, METHODS)

    def __repr__(self) -> str:
        model = self.engine.config.model_config
        return f"LLM(model={model.model!r}, dtype={model.dtype!r}, max_model_len={model.max_model_len})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _template(self, given: str | None, *, with_tools: bool) -> ChatTemplate:
        if given is not None and not (isinstance(given, str) and given):
            raise InvalidParameter(
                f"chat_template must be a non-empty string or None, got {shown(given)} ({type(given).__name__})",
                parameter="chat_template",
            )
        key = given, with_tools
        if key not in self._templates:
            source = given or self.engine.config.model_config.chat_template
            self._templates[key] = load_chat_template(self.get_tokenizer(), source, with_tools=with_tools)
        return self._templates[key]

    def _run(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """What becomes of the prompts, once it is this thread's turn."""
        _check_bool(use_tqdm=use_tqdm)
        with self._turn:
            outputs = self._run_together(prompts, params, priorities, use_tqdm)
        _log_warnings(outputs)
        return outputs

    def _run_together(
        self,
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Queue everything, step until all is finished; on any exception nothing stays behind."""
        request_ids: list[str] = []
        try:
            num_sequences = 0
            for index, (prompt, given, priority) in enumerate(zip(prompts, params, priorities, strict=True)):
                final = (given or self.engine.default_params).clone(output_kind=RequestOutputKind.FINAL_ONLY)
                num_sequences += final.num_sequences
                request_ids.append(str(next(self._ids)))  # first: a Ctrl-C may end the next line
                with _named(f"prompt {index}", among=len(prompts)):
                    self.engine.add_request(request_ids[-1], prompt, final, priority=priority)
            if num_sequences > 1:  # the graph of one is there: a single answer does not wait for the others
                self.engine.capture_graphs()
            done = self._drain(len(prompts), use_tqdm)
        except BaseException:
            self.engine.abort_request(request_ids)
            raise
        for index, request_id in enumerate(request_ids):
            if any(completion.finish_reason == "error" for completion in done[request_id].outputs):
                log.error("prompt %d failed: %s", index, " ".join(done[request_id].warnings))
        return [done[request_id] for request_id in request_ids]

    def _drain(self, num_requests: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        num_prompt_tokens = num_output_tokens = 0
        with generate_progress(use_tqdm, num_requests) as progress:
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    done[output.request_id] = output
                    num_prompt_tokens += len(output.prompt_token_ids)
                    num_output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    progress(len(done), num_prompt_tokens, num_output_tokens)
        return done


def _log_warnings(outputs: Sequence[RequestOutput]) -> None:
    """One line for the warnings of all outputs; those of failed ones were logged as errors."""
    good = [output for output in outputs if all(each.finish_reason != "error" for each in output.outputs)]
    texts = list(dict.fromkeys(text for output in good for text in output.warnings))
    if texts:
        more = f" (and {counted(len(texts) - 1, 'more warning')}; see RequestOutput.warnings)" if texts[1:] else ""
        log.warning("%s%s", texts[0], more)


def _llm_signature() -> inspect.Signature:
    """The options of `EngineArgs` as keywords, in the help of editors and notebooks."""
    options = signature_of(EngineArgs).parameters.values()
    return inspect.Signature(
        [each.replace(kind=each.POSITIONAL_OR_KEYWORD) if each.name == "model" else each for each in options]
    )


def _options_text() -> str:
    lines = [f"    {option.name}: {option.metadata['help']}" for option in dataclasses.fields(EngineArgs)]
    return "\n".join(["    Options:", *(f"    {line}" for line in lines)])


LLM.__signature__ = _llm_signature()  # type: ignore[attr-defined]
LLM.__doc__ = f"{(LLM.__doc__ or '').rstrip()}\n\n{_options_text()}\n    "


def _as_prompts(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt or many: text, a mapping and a list of integers are one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidParameter(
            f"prompts must be a prompt (text, a list of token ids, a mapping) or a list of prompts, got "
            f"{shown(prompts)} ({type(prompts).__name__})",
            parameter="prompts",
        )
    if prompts and all(isinstance(item, Integral) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def _as_beam_params(given: object) -> BeamSearchParams:
    if isinstance(given, Mapping):
        missing = [name for name in ("beam_width", "max_tokens") if name not in given]
        if missing:
            raise InvalidParameter(f"a beam search needs {missing[0]}", parameter=missing[0])
        return BeamSearchParams(**given)
    if not isinstance(given, BeamSearchParams):
        raise InvalidParameter(
            f"params must be BeamSearchParams or a mapping of its fields, got {shown(given)} ({type(given).__name__})",
            parameter="params",
        )
    return given


def _for_each(given: ParamsLike | Sequence[ParamsLike] | None, count: int) -> list[SamplingParams | None]:
    if isinstance(given, (list, tuple)):
        if len(given) != count:
            raise InvalidParameter(
                f"{len(given)} sampling_params for {counted(count, 'prompt')}; give one for all or one for each",
                parameter="sampling_params",
            )
        checked = []
        for index, one in enumerate(given):
            with _named(f"prompt {index}", among=count):
                checked.append(as_params(one))
        return checked
    return [as_params(given)] * count


def _priorities(given: Sequence[int] | None, count: int) -> Sequence[int]:
    """One for each prompt; `InputProcessor` checks their values."""
    if given is None:
        return [0] * count
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise InvalidParameter(
            f"priority must be a list with one integer for each of {counted(count, 'prompt')}, got {shown(given)}",
            parameter="priority",
        )
    return given


def _check_bool(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidParameter(
                f"{name} must be True or False, got {shown(value)} ({type(value).__name__})", parameter=name
            )


@contextmanager
def _named(place: str, *, among: int) -> Iterator[None]:
    """Errors say which of several inputs they are about."""
    try:
        yield
    except RequestError as error:
        if among == 1:
            raise
        raise error.within(place) from error.__cause__
