"""From what a user hands in to a validated `EngineCoreRequest`: the one validator for every way in.

Everything that depends on the model is checked here, once, before the core hears of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from quire.config.engine import QuireConfig
from quire.engine.front.thinking import gate_in_force, gate_with_thinking
from quire.errors import InvalidParameter, PromptTooLong, UnsupportedFeature, counted, shown
from quire.inputs import PromptType
from quire.messages.request import MAX_PRIORITY, EngineCoreRequest
from quire.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams, checked_names, read_integer
from quire.structured.checker import GrammarChecker
from quire.structured.grammar import Gate, Grammar, Thinking, Vocabulary
from quire.tokenizer.tokenizer import Tokenizer
from quire.tokenizer.vocabulary import vocabulary_of
from quire.utils.lazy import nearest
from quire.utils.unicode import check_unicode

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
CHECKER = "quire.engine.front.checker"
"""Run as a program, it checks grammars."""
MAX_CACHE_SALT = 128
MAX_REQUEST_ID = 512
MAX_BEAM_CANDIDATES = 1 << 22
"""Of a step of a beam search, when logprobs are asked for: all beams are told of together, in some 60 MB."""
CHARS_PER_TOKEN = 64
"""A text with more characters than this per token of context is refused before it is tokenised."""


_Lists = tuple[tuple[object, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """What the core runs, and what only the front needs."""

    core: EngineCoreRequest
    prompt: str | None
    warnings: tuple[str, ...]


class InputProcessor:
    """Validates, tokenises, fills in defaults."""

    def __init__(
        self, config: QuireConfig, tokenizer: Tokenizer | None, clock: Callable[[], float], seeds: Iterator[int]
    ) -> None:
        """`seeds` are for requests that bring none, one after the other."""
        self.config = config
        self.tokenizer = tokenizer
        self.clock = clock
        known = config.model_config.eos_token_ids
        first = [] if tokenizer is None else [token_id for token_id in known if token_id == tokenizer.eos_token_id]
        self._eos_token_ids = tuple(dict.fromkeys([*first, *known]))
        """The tokenizer's own comes first: it ends an output without a stop reason, as in vLLM."""
        self.grammars = GrammarChecker(self._vocabulary, config.decoding_config.backend, module=CHECKER)
        """What requests ask for with structured_outputs, checked in a process of its own."""
        self.thinking: Thinking | None = None
        """How the model marks its thinking, for requests with thinking_token_budget that do not say it."""
        self._seeds = seeds
        self._seeds_lock = Lock()
        self._worked_out: tuple[_Lists, tuple[tuple[int, ...], ...], bytes | None] | None = None
        """The lists that came last, and what they come to: a request of a thousand prompts brings them a thousand
        times."""

    @property
    def default_params(self) -> SamplingParams:
        """What a request without sampling parameters gets: the model's own defaults."""
        return SamplingParams(**self.config.model_config.generation_defaults)

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        tenant: str = "",
        received_at: float = 0.0,
        priority: int = 0,
    ) -> ProcessedRequest:
        """Check and complete one request of a tenant; it came in at `received_at`, or now.

        `priority`: lower ones are served first, where the engine serves by priority.

        Raises: RequestErrors naming the field, the numbers and the remedy.
        """
        received_at = received_at or self.clock()
        priority = self._checked_priority(priority)
        params = self.default_params if params is None else params
        text, token_ids, salt = self._parse(prompt)
        if token_ids is None:
            token_ids = self.encode(text or "")
        max_tokens, warnings = self.check(token_ids, params)
        bad_words, allowed = self._lists_of(params)
        grammar = self.grammar_of(params, token_ids)
        moved = ("allowed_token_ids", "structured_outputs", "thinking_token_budget", "gate")
        changes = dict.fromkeys(name for name in moved if getattr(params, name) is not None)
        core = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params.clone(**changes) if changes else params,
            seed=params.seed if params.seed is not None else self._draw_seed(),
            max_tokens=max_tokens,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=bad_words,
            allowed_tokens=allowed,
            grammar=grammar,
            cache_salt=salt,
            tenant=tenant,
            priority=priority,
            received_at=received_at,
            arrived_at=self.clock(),
        )
        return ProcessedRequest(core, text, (*params.warnings, *warnings))

    def check(self, token_ids: list[int], params: SamplingParams) -> tuple[int, list[str]]:
        """Everything about tokens and parameters that depends on the model; how long the output may get, and warnings.

        Raises: RequestErrors naming the field, the numbers and the remedy.
        """
        self._check_prompt(token_ids)
        self._check_params(params)
        return self._max_tokens(params, len(token_ids))

    def grammar_of(self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> Grammar | None:
        """The grammar of `structured_outputs`, and from where on it counts. May take a second; what was asked for
        before is remembered.

        Raises: RequestErrors naming the field, the JSON pointer and the reason.
        """
        gate = gate_in_force(params, self.thinking, prompt_token_ids, self._text_of)
        if gate is not None:
            self._check_gate(params, gate)
        if params.structured_outputs is not None:
            grammar = self.grammars.check(params.structured_outputs)
            return grammar if gate is None else replace(grammar, gate=gate)
        is_limited = gate is not None and gate.thinking is not None and gate.thinking.budget is not None
        return Grammar(text="", backend=self.config.decoding_config.backend, gate=gate) if is_limited else None

    def self_contained(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> SamplingParams:
        """The same parameters for an engine that was not told how the model marks its thinking.

        Raises: UnsupportedFeature.
        """
        gate = gate_with_thinking(params, self.thinking, prompt_token_ids, self._text_of)
        return params if gate is params.gate else params.clone(gate=gate)

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, special tokens included."""
        return "" if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _check_gate(self, params: SamplingParams, gate: Gate) -> None:
        """Whether the model has the tokens, and the bytes of all tokens are known, in which texts are looked for."""
        name = "gate" if params.thinking_token_budget is None else "thinking_token_budget"
        self._check_ids("gate", gate.token_ids)
        try:
            self.grammars.vocabulary()
        except UnsupportedFeature as error:
            reason = error.message.partition(": ")[2]
            raise UnsupportedFeature(f"{name} is not supported here: {reason}", parameter=name) from None

    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self.tokenizer, self.config.model_config.arch.vocab_size, self._eos_token_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt.

        Raises: PromptTooLong before any work for a text that cannot fit; UnsupportedFeature without a tokenizer.
        """
        if self.tokenizer is None:
            raise UnsupportedFeature(
                "this engine has no tokenizer (skip_tokenizer_init=True): give prompt_token_ids", parameter="prompt"
            )
        self.check_characters(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_length(self, num_tokens: int) -> None:
        """Refuse a prompt that does not fit the context.

        Raises: PromptTooLong.
        """
        limit = self.config.model_config.max_model_len
        if num_tokens >= limit:
            raise PromptTooLong.of(num_tokens, limit)

    def check_characters(self, text: str) -> None:
        """Refuse a text that is too long to be worth tokenising.

        Raises: PromptTooLong.
        """
        limit = self.config.model_config.max_model_len
        if len(text) > limit * CHARS_PER_TOKEN:
            raise PromptTooLong(
                f"This model's maximum context length is {limit} tokens; the prompt has {len(text)} characters, more "
                f"than {CHARS_PER_TOKEN} per token. Shorten the prompt.",
                num_tokens=len(text) // CHARS_PER_TOKEN,
                limit=limit,
            )

    def _parse(self, prompt: Any) -> tuple[str | None, list[int] | None, str | None]:
        """(text, token ids, cache salt) of any kind of prompt."""
        if isinstance(prompt, str):
            return prompt, None, None
        if isinstance(prompt, (list, tuple)):
            return None, self._token_list(prompt), None
        if not isinstance(prompt, Mapping):
            raise InvalidParameter(
                f"a prompt must be text, a list of token ids, or a mapping with {' or '.join(PROMPT_KEYS[:2])}; "
                f"got {type(prompt).__name__}",
                parameter="prompt",
            )
        for key in prompt:
            if key not in PROMPT_KEYS:
                raise UnsupportedFeature(
                    f"a prompt has no key {shown(key)}{nearest(str(key), list(PROMPT_KEYS))}; "
                    f"known are {', '.join(PROMPT_KEYS)}",
                    parameter=str(key),
                )
        text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        if text is None and ids is None:
            raise InvalidParameter("a prompt needs the key prompt or prompt_token_ids", parameter="prompt")
        if text is not None and not isinstance(text, str):
            raise InvalidParameter(f"prompt must be text, got {type(text).__name__}", parameter="prompt")
        self.check_characters(text or "")  # beside token ids it is only echoed, but kept and sent back
        check_unicode(text or "", "prompt")
        if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_CACHE_SALT):
            raise InvalidParameter(
                f"cache_salt must be a string of 1 to {MAX_CACHE_SALT} characters, got {shown(salt)}",
                parameter="cache_salt",
            )
        check_unicode(salt or "", "cache_salt")
        return text, None if ids is None else self._token_list(ids), salt

    def _token_list(self, value: object) -> list[int]:
        """Token ids as plain integers; their number is compared with the context before any is looked at."""
        if isinstance(value, (list, tuple)):
            self.check_length(len(value))
        return _token_list(value)

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise InvalidParameter(
                "the prompt is empty: this model needs at least one token to start from", parameter="prompt"
            )
        self.check_length(len(token_ids))
        self._check_ids("prompt_token_ids", token_ids)

    def _check_ids(self, name: str, token_ids: Collection[int]) -> None:
        vocab_size = self.config.model_config.arch.vocab_size
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InvalidParameter(
                f"{name} holds {shown(wrong)}; this model's token ids are 0 to {vocab_size - 1}", parameter=name
            )

    def _checked_priority(self, given: object) -> int:
        try:
            priority = read_integer(given)
        except TypeError:
            raise InvalidParameter(
                f"priority must be an integer, got {shown(given)} ({type(given).__name__})", parameter="priority"
            ) from None
        if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
            raise InvalidParameter(
                f"priority must be in [{-MAX_PRIORITY - 1}, {MAX_PRIORITY}], got {shown(priority)}",
                parameter="priority",
            )
        if priority and self.config.scheduler_config.policy != "priority":
            raise InvalidParameter(
                f"priority={priority} has no effect: this engine serves requests in order of arrival. Start it with "
                "--scheduling-policy priority, or leave priority out.",
                parameter="priority",
            )
        return priority

    def _check_params(self, params: SamplingParams) -> None:
        model, limits = self.config.model_config, self.config.scheduler_config
        if len(params.allowed_token_ids or ()) > model.arch.vocab_size:
            self._check_ids("allowed_token_ids", [max(params.allowed_token_ids or ())])  # ids do not repeat
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        if params.num_sequences > limits.max_num_seqs:
            name = params.name_of_num_sequences
            raise InvalidParameter(
                f"{name}={params.num_sequences} exceeds {counted(limits.max_num_seqs, 'sequence')}, all that the "
                f"engine runs at once; lower {name} or raise max_num_seqs",
                parameter=name,
            )
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            count = model.arch.vocab_size if asked == -1 else asked
            if count is not None and count > model.max_logprobs:
                raise InvalidParameter(
                    f"{name}={asked} asks for {counted(count, 'candidate')} per position, the limit is "
                    f"{model.max_logprobs}; lower it or start with a larger max_logprobs (-1: no limit)",
                    parameter=name,
                )
        if params.use_beam_search:
            self._check_beams(params)
        for name, wants_text in (("stop", bool(params.stop_strings)), ("bad_words", bool(params.bad_words))):
            if wants_text and self.tokenizer is None:
                raise UnsupportedFeature(
                    f"{name} needs a tokenizer, and this engine runs with skip_tokenizer_init=True; use token ids",
                    parameter=name,
                )

    def _check_beams(self, params: SamplingParams) -> None:
        """Whether the engine reports as many candidates as beams need: `EngineCoreRequest.num_logprobs`."""
        model = self.config.model_config
        width = params.num_sequences
        ending = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos_token_ids)}
        limit = min(model.max_logprobs, model.arch.vocab_size)
        if width + len(ending) > limit:
            raise InvalidParameter(
                f"beam_width={width} with {counted(len(ending), 'token')} that end a beam needs "
                f"{width + len(ending)} candidates per position, the limit is {limit}; lower beam_width or start with "
                "a larger max_logprobs (-1: the vocabulary)",
                parameter="beam_width",
            )
        asked = model.arch.vocab_size if params.logprobs == -1 else params.logprobs or 0
        if width * asked > MAX_BEAM_CANDIDATES:
            raise InvalidParameter(
                f"logprobs={params.logprobs} with beam_width={width} asks for {width * asked} candidates per step, the "
                f"limit is {MAX_BEAM_CANDIDATES}; lower one of them",
                parameter="logprobs",
            )

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> tuple[int, list[str]]:
        """How long the output may get, and a warning where the context has less room than was asked for.

        `max_tokens` is a bound, and the context is another one: the lower one holds, for every way in. So the warning
        names no field: each API has its own name for it.
        """
        limit = self.config.model_config.max_model_len
        room = limit - num_prompt_tokens
        if params.min_tokens > room:
            raise InvalidParameter(
                f"min_tokens={params.min_tokens} cannot be reached: the context leaves room for "
                f"{counted(room, 'token')} after a prompt of {num_prompt_tokens}",
                parameter="min_tokens",
            )
        if params.max_tokens is None:
            return room, []
        if params.max_tokens > room:
            return room, [
                f"the answer can have {counted(room, 'token')}, not {params.max_tokens}: the prompt takes "
                f"{num_prompt_tokens} of the {limit} tokens of the context"
            ]
        return params.max_tokens, []

    def _draw_seed(self) -> int:
        """A seed for a request without one. Requests may be processed in several threads."""
        with self._seeds_lock:
            return next(self._seeds)

    def _lists_of(self, params: SamplingParams) -> tuple[tuple[tuple[int, ...], ...], bytes | None]:
        """The tokens of bad_words, and the bits of the tokens that are allowed; None allows all."""
        lists = (params.bad_words, params.allowed_token_ids, params.stop_token_ids, [params.min_tokens])
        given: _Lists = tuple(None if entries is None else tuple(entries) for entries in lists)
        known = self._worked_out
        if known is None or known[0] != given:  # several threads: what is read is whole, whoever wrote it
            bad_words = self._bad_words(params)
            known = self._worked_out = given, bad_words, self._allowed_tokens(params, bad_words)
        return known[1:]

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it is tokenised at the start of a text and after a space."""
        if not params.bad_words or self.tokenizer is None:
            return ()
        sequences: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                try:
                    ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
                except InvalidParameter as error:
                    raise InvalidParameter(f"bad_words: {shown(word)}: {error}", parameter="bad_words") from None
                if ids:
                    sequences[ids] = None
        num_tokens = sum(map(len, sequences))
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidParameter(
                f"bad_words come to {num_tokens} tokens, each word with and without a leading space; the limit is "
                f"{MAX_BAD_WORD_TOKENS}. Give fewer or shorter words.",
                parameter="bad_words",
            )
        return tuple(sequences)

    def _allowed_tokens(self, params: SamplingParams, bad_words: tuple[tuple[int, ...], ...]) -> bytes | None:
        """The bits of `allowed_token_ids`.

        Raises: InvalidParameter when nothing is left of them for the first token.
        """
        vocab_size = self.config.model_config.arch.vocab_size
        banned = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens > 0:
            banned |= {*self._eos_token_ids, *(params.stop_token_ids or ())}
        allowed = params.allowed_token_ids
        candidates = range(vocab_size) if allowed is None else allowed
        if len(candidates) <= len(banned) and banned.issuperset(candidates):
            raise InvalidParameter(
                f"no first token can be chosen: {_of_all(allowed, vocab_size)} are excluded by bad_words or, until "
                f"min_tokens={params.min_tokens} is reached, because they end the output. Allow another token, or "
                "loosen min_tokens, stop_token_ids or bad_words.",
                parameter="bad_words" if allowed is None else "allowed_token_ids",
            )
        return None if allowed is None else as_bits(allowed, vocab_size)


def _of_all(allowed: list[int] | None, vocab_size: int) -> str:
    return f"all {vocab_size} tokens" if allowed is None else f"all {len(allowed)} of allowed_token_ids"


def as_bits(token_ids: Iterable[int], vocab_size: int) -> bytes:
    """One bit for each token of the vocabulary, the lowest first."""
    bits = bytearray((vocab_size + 7) // 8)
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)


def check_request_id(request_id: object, in_use: Container[str]) -> None:
    """Refuse an id that is no text or not unique.

    Raises: InvalidParameter.
    """
    if not isinstance(request_id, str) or not request_id:
        raise InvalidParameter("request_id must be a non-empty string", parameter="request_id")
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidParameter(
            f"request_id has {len(request_id)} characters, the limit is {MAX_REQUEST_ID}", parameter="request_id"
        )
    if request_id in in_use:
        raise InvalidParameter(f"request_id {request_id!r} is in use; ids must be unique", parameter="request_id")


def _token_list(value: object) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise InvalidParameter(
            f"prompt_token_ids must be a list of integers, got {type(value).__name__}; arrays have tolist()",
            parameter="prompt_token_ids",
        )
    token_ids = list(value)
    for index, item in enumerate(token_ids):
        if type(item) is int:
            continue
        try:
            token_ids[index] = read_integer(item)
        except TypeError:
            raise InvalidParameter(
                f"prompt_token_ids must be a list of integers, but holds {shown(item)} ({type(item).__name__})",
                parameter="prompt_token_ids",
            ) from None
    return token_ids


def as_params(given: object) -> SamplingParams | None:
    """Accept a mapping of fields for `SamplingParams`.

    Raises: InvalidParameter for anything else.
    """
    if isinstance(given, Mapping):
        return SamplingParams(**checked_names(given))
    if given is not None and not isinstance(given, SamplingParams):
        raise InvalidParameter(
            f"sampling_params must be SamplingParams, a mapping of its fields or None, got {shown(given)} "
            f"({type(given).__name__})",
            parameter="sampling_params",
        )
    return given
