"""`SamplingParams`: how the tokens of one request are chosen, validated once and completely.

Fields, defaults and ranges follow the vLLM surface so that existing code runs unchanged. What quire cannot do yet is
refused here by name; nothing is accepted and ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from inspect import Signature, signature
from numbers import Integral, Real
from typing import Any

from quire.errors import InvalidParameter, UnsupportedFeature, counted, shown
from quire.structured.gate_fields import check_gate, gate_of
from quire.structured.grammar import Gate
from quire.structured.params import StructuredOutputsParams
from quire.utils.lazy import nearest
from quire.utils.unicode import check_unicode

MAX_N = 16_384
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 0.01
NEVER = "never"
"""Of `early_stopping`."""


class RequestOutputKind(IntEnum):
    """What each `RequestOutput` of a streamed request carries."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """Only what is new."""
    FINAL_ONLY = 2
    """Nothing until the request is finished, then everything."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SamplingParams:
    """How the tokens of one request are chosen.

    Raises: InvalidParameter (a RequestError) naming the field, the value and the allowed range; UnsupportedFeature for
    fields that no part of quire can honour yet.
    """

    n: int = 1
    """Number of completions per prompt; the prompt is computed once."""
    best_of: int | None = None
    """Completions to generate per prompt, of which the n with the highest cumulative logprob are returned, best first;
    None generates n and leaves their order. Nothing is returned before all have ended."""
    use_beam_search: bool = False
    """Search for the most likely completions instead of drawing them; see `quire.core.beam`. Needs temperature=0."""
    beam_width: int | None = None
    """Beams of a beam search, of which the best n are returned; None means n."""
    length_penalty: float = 1.0
    """Beam search ranks by the sum of logprobs divided by the number of tokens to this power, in [-10, 10]."""
    early_stopping: bool | str = False
    """When a beam search ends: True as soon as beam_width beams have ended, False when no running beam is better than
    they are, "never" when no running beam can become better."""
    temperature: float = 1.0
    """0 is greedy; values between 0 and 0.01 are raised to 0.01 with a warning."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p, in (0, 1]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens that occurred in the output, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, when negative) logits of tokens in prompt or output, in [0.001, 1000]."""
    seed: int | None = None
    """Makes the samples reproducible; None draws one and reports it, -1 means None."""
    stop: str | list[str] | None = None
    """Strings that end the output."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Upper limit of the output; None means as many as the context holds, and more than that is lowered to it."""
    min_tokens: int = 0
    """No end-of-sequence or stop token, and no stop string, before this many output tokens."""
    logprobs: int | None = None
    """Number of most likely tokens to report per output position; -1 reports the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for the prompt's positions; such a request does not read the prefix cache."""
    detokenize: bool = True
    """Produce text; without it only token ids are returned."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put a space between special tokens that stand side by side in the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each streamed output carries."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids, each clamped to [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Only these token ids may be produced."""
    bad_words: list[str] | None = None
    """Words whose tokens, with or without a leading space, are never produced. Other tokens may still spell them."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt even if it is cached; prompt_logprobs needs that and implies it."""
    extra_args: Mapping[str, Any] | None = None
    """Reserved for plug-ins; refused while there are none."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the output must have, as such an object or as a mapping of its fields. The output then ends with
    the first end-of-sequence token, which comes when the form is complete."""
    thinking_token_budget: int | None = None
    """Most tokens of thinking before the answer; then the thinking is ended. None and -1 do not limit it."""
    gate: Gate | None = None
    """From where on `structured_outputs` counts. Set by the server's APIs and by whoever writes a message format."""
    warnings: tuple[str, ...] = field(default=(), init=False, compare=False)
    """What was adjusted; copied to the output."""

    def __new__(cls, *values: Any, **given: Any) -> SamplingParams:
        """Refuse what has no name or an unknown one before the generated `__init__` raises its TypeError."""
        if values:
            raise InvalidParameter(
                f"SamplingParams takes keywords only, such as temperature=0.8; got {shown(values[0])} without a name",
                parameter="sampling_params",
            )
        checked_names(given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _read_all(self)
        _check_ranges(self)
        _check_together(self)
        _normalise(self)

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = [f"{f.name}={values[f.name]!r}" for f in fields(self) if values[f.name] != f.default]
        return f"SamplingParams({', '.join(changed)})"

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Build from keywords, leaving out those that are None.

        Raises: InvalidParameter for an unknown keyword, with the nearest known one.
        """
        return cls(**{name: value for name, value in checked_names(given).items() if value is not None})

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields replaced, validated again; warnings about the other fields stay."""
        copy = replace(self, **checked_names(changes))
        kept = [text for text in self.warnings if text.partition(" ")[0] not in changes]  # each starts with its field
        object.__setattr__(copy, "warnings", tuple(dict.fromkeys((*kept, *copy.warnings))))
        return copy

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def num_sequences(self) -> int:
        """Sequences that run for each prompt, returned or not."""
        return self.beam_width or self.best_of or self.n

    @property
    def name_of_num_sequences(self) -> str:
        """The field that sets `num_sequences`."""
        return "beam_width" if self.use_beam_search else "best_of" if self.is_ranked else "n"

    @property
    def is_ranked(self) -> bool:
        """Whether the completions are returned in the order of their cumulative logprobs."""
        return self.best_of is not None and self.best_of > 1

    @property
    def is_streamable(self) -> bool:
        """Whether tokens can be returned before all completions have ended."""
        return not self.use_beam_search and not self.is_ranked

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def num_listed(self) -> int:
        """Entries of all lists and mappings, and characters of all texts: what writing them down costs."""
        texts = (*self.stop_strings, *(self.bad_words or ()))
        lists = (self.stop_token_ids, self.logit_bias, self.allowed_token_ids)
        forms = sum(form.num_characters for form in (self.structured_outputs, self.gate) if form is not None)
        return sum(map(len, texts)) + sum(len(entries or ()) for entries in lists) + forms

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may stand in for computing the prompt."""
        return not self.skip_reading_prefix_cache and self.prompt_logprobs is None


SamplingParams.__signature__ = Signature(  # type: ignore[attr-defined]
    [p for name, p in signature(SamplingParams.__init__).parameters.items() if name != "self"]
)
FIELD_NAMES = tuple(f.name for f in fields(SamplingParams) if f.init)


def checked_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` unchanged, or InvalidParameter for the first name that SamplingParams does not have."""
    for name in given:
        if str(name).startswith("guided_"):  # vLLM's, before it had structured_outputs
            kind = str(name).removeprefix("guided_")
            raise UnsupportedFeature(
                f"{shown(name)} is an old name: use structured_outputs={{{kind!r}: ...}}", parameter=str(name)
            )
        if name not in FIELD_NAMES:
            raise InvalidParameter(
                f"SamplingParams has no parameter {shown(name)}{nearest(str(name), list(FIELD_NAMES))}",
                parameter=str(name),
            )
    return dict(given)


def _plain(number: float) -> str:
    """A bound with all of its digits: 2147483647, not 2.14748e+09."""
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a list, mapping or text may hold. Lengths are compared before anything is walked."""

    items: int | None = None
    """Entries of a list or mapping; None for what is a single text."""
    characters: int | None = None
    """Of each text."""
    total_characters: int | None = None
    """Of all texts together."""


BOUNDS: dict[str, Bound] = {
    "stop": Bound(items=64, characters=1024, total_characters=4096),
    "stop_token_ids": Bound(items=1024),
    "logit_bias": Bound(items=1024),
    "allowed_token_ids": Bound(items=2**18),
    "bad_words": Bound(items=128, characters=256, total_characters=8192),
    "extra_args": Bound(items=0),
    **dict.fromkeys(("structured_outputs", "gate"), Bound(items=16)),
}
"""For every field that is no plain number or flag. An engine also refuses more allowed_token_ids than its vocabulary
has tokens, and bad_words of more than `MAX_BAD_WORD_TOKENS` tokens. Fields bounded to 0 are refused by name."""
MAX_BAD_WORD_TOKENS = 2048
"""Tokens of all bad words together, each word with and without a leading space."""


def _check_length(name: str, value: object) -> None:
    """Refuse what is too long, without looking at its entries."""
    bound = BOUNDS.get(name)
    if bound is None or not bound.items or not isinstance(value, Sized):
        return
    if isinstance(value, str):
        _check_texts(name, (value,), bound)
    elif len(value) > bound.items:
        held = counted(len(value), "entry", "entries")
        raise InvalidParameter(f"{name} holds {held}, the limit is {bound.items}", parameter=name)


def _check_texts(name: str, texts: Sequence[str], bound: Bound) -> None:
    longest, total = max(map(len, texts), default=0), sum(map(len, texts))
    for number, limit, what in (
        (longest, bound.characters, "a text"),
        (total, bound.total_characters, "texts"),
    ):
        if limit is not None and number > limit:
            raise InvalidParameter(f"{name} holds {what} of {number} characters, the limit is {limit}", parameter=name)


Reader = Callable[[object], object]
"""Gives the plain Python value of what may stand for it (numpy's numbers do), or raises."""
_UNREADABLE = (TypeError, ValueError, OverflowError)


def read_integer(value: object) -> int:
    """An integer; a bool is none.

    Raises: TypeError.
    """
    if type(value) is int:  # the ABC below takes ten times as long
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _read_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _read_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _read_texts(value: object) -> object:
    return value if isinstance(value, str) else _list_of(_read_text)(value)


def _read_count(value: object) -> int:
    return 1 if value is True else read_integer(value)


def _read_stopping(value: object) -> bool | str:
    if isinstance(value, str) and value == NEVER:
        return NEVER
    return _read_bool(value)


def _read_kind(value: object) -> RequestOutputKind:
    if not isinstance(value, RequestOutputKind):
        raise TypeError
    return value


def _read_bias(value: object) -> dict[int, float]:
    return {read_integer(token_id): _read_number(bias) for token_id, bias in _read_mapping(value).items()}


def _read_mapping(value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return value


def _list_of(read: Reader) -> Reader:
    def read_list(value: object) -> list[object]:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        return [read(item) for item in value]

    return read_list


def _or_none(read: Reader) -> Reader:
    return lambda value: None if value is None else read(value)


_KINDS: dict[str, tuple[Reader, str]] = {
    **dict.fromkeys(("n", "top_k", "min_tokens"), (read_integer, "an integer")),
    **dict.fromkeys(("seed", "max_tokens", "best_of", "beam_width"), (_or_none(read_integer), "an integer or None")),
    "thinking_token_budget": (_or_none(read_integer), "an integer or None"),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), (_or_none(_read_count), "an integer or None")),
    **dict.fromkeys(
        (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "length_penalty",
        ),
        (_read_number, "a finite number"),
    ),
    **dict.fromkeys(
        (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "use_beam_search",
        ),
        (_read_bool, "True or False"),
    ),
    "early_stopping": (_read_stopping, 'True, False or "never"'),
    "skip_reading_prefix_cache": (_or_none(_read_bool), "True, False or None"),
    "stop": (_or_none(_read_texts), "a string, a list of strings or None"),
    "bad_words": (_or_none(_list_of(_read_text)), "a list of strings or None"),
    "stop_token_ids": (_or_none(_list_of(read_integer)), "a list of integers or None"),
    "allowed_token_ids": (_or_none(_list_of(read_integer)), "a list of integers or None"),
    "logit_bias": (_or_none(_read_bias), "a mapping from token ids to finite numbers, or None"),
    "output_kind": (_read_kind, "a RequestOutputKind"),
    "extra_args": (_or_none(_read_mapping), "a mapping or None"),
    "structured_outputs": (_or_none(StructuredOutputsParams.of), "StructuredOutputsParams, a mapping or None"),
    "gate": (_or_none(gate_of), "a Gate, a mapping or None"),
}


def _read_all(params: SamplingParams) -> None:
    """Every field as a plain value of its kind."""
    for name, (read, expected) in _KINDS.items():
        value = getattr(params, name)
        _check_length(name, value)
        try:
            object.__setattr__(params, name, read(value))
        except _UNREADABLE:
            raise InvalidParameter(
                f"{name} must be {expected}, got {shown(value)} ({type(value).__name__})", parameter=name
            ) from None


@dataclass(frozen=True, slots=True)
class Range:
    """The values a field may have."""

    low: float
    high: float
    open_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"greater than {_plain(self.low)}" if self.open_low else f"at least {_plain(self.low)}"
        return f"in {'(' if self.open_low else '['}{_plain(self.low)}, {_plain(self.high)}]"


RANGES = {
    "n": Range(1, MAX_N),
    "best_of": Range(1, MAX_N),
    "beam_width": Range(2, MAX_N),
    "length_penalty": Range(-10, 10),  # beyond, a long answer's length to this power overflows float64
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open_low=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(1e-3, 1e3),  # beyond, logits of a sound model overflow float32
    "seed": Range(-(2**63), 2**63 - 1),
    "max_tokens": Range(1, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "logprobs": Range(-1, 2**31 - 1),
    "prompt_logprobs": Range(-1, 2**31 - 1),
    "thinking_token_budget": Range(-1, 2**31 - 1),
}


def _check_ranges(params: SamplingParams) -> None:
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if value is not None and value not in allowed:
            raise InvalidParameter(f"{name} must be {allowed}, got {shown(value)}", parameter=name)
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            if not 0 <= token_id < 2**31:
                raise InvalidParameter(f"{name} holds {shown(token_id)}, which is no token id", parameter=name)


def _check_together(params: SamplingParams) -> None:
    _check_branches(params)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidParameter(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})", parameter="min_tokens"
        )
    for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or ())):
        _check_texts(name, texts, BOUNDS[name])
        for text in texts:
            check_unicode(text, name)
    if any(not text for text in params.stop_strings):
        raise InvalidParameter("stop must not contain an empty string: it would end every output", parameter="stop")
    if params.stop_strings and not params.detokenize:
        raise InvalidParameter("stop needs detokenize=True: without text no string can be found", parameter="stop")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidParameter(
            "allowed_token_ids must not be empty: no token could be chosen", parameter="allowed_token_ids"
        )
    if any(not word.strip() for word in params.bad_words or ()):
        raise InvalidParameter("bad_words must not contain an empty or blank string", parameter="bad_words")
    if params.prompt_logprobs is not None and params.skip_reading_prefix_cache is False:
        raise InvalidParameter(
            "skip_reading_prefix_cache=False with prompt_logprobs: what is cached has no logits to report from; leave "
            "one of them out",
            parameter="skip_reading_prefix_cache",
        )
    if params.structured_outputs is not None and params.ignore_eos:
        raise InvalidParameter(
            "ignore_eos does not go with structured_outputs: the end-of-sequence token ends an output whose form is "
            "complete. Leave out one of the two.",
            parameter="ignore_eos",
        )
    if params.gate is not None:
        check_gate(params.gate, params.thinking_token_budget, has_form=params.structured_outputs is not None)
    if params.extra_args:
        raise UnsupportedFeature(
            f"extra_args is not supported: nothing would read {shown(next(iter(params.extra_args)))}",
            parameter="extra_args",
        )


_FOR_BEAMS = {"beam_width": None, "length_penalty": 1.0, "early_stopping": False}
"""Fields that only a beam search reads, and their defaults."""
_NOT_FOR_BEAMS = {
    "best_of": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": None,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "gate": None,
}
"""Fields that a beam search cannot honour, and their defaults."""


def _check_branches(params: SamplingParams) -> None:
    if params.best_of is not None and params.best_of < params.n:
        raise InvalidParameter(
            f"best_of ({params.best_of}) must not be less than n ({params.n}): the best n of them are returned",
            parameter="best_of",
        )
    if params.use_beam_search:
        _check_beams(params)
    else:
        for name, default in _FOR_BEAMS.items():
            if getattr(params, name) != default:
                raise InvalidParameter(f"{name} needs use_beam_search=True; nothing else reads it", parameter=name)
    if params.output_kind is RequestOutputKind.DELTA and not params.is_streamable:
        name = "use_beam_search" if params.use_beam_search else "best_of"
        raise InvalidParameter(
            f"{name} cannot be streamed: which completions are the best is known when all have ended. Leave out "
            f"{name} or the streaming.",
            parameter=name,
        )


def _check_beams(params: SamplingParams) -> None:
    width = params.n if params.beam_width is None else params.beam_width
    if width < 2:
        raise InvalidParameter(
            f"beam_width must be at least 2 with use_beam_search, got {width} (without it, n counts): one beam is "
            "greedy decoding, temperature=0",
            parameter="beam_width",
        )
    if params.n > width:
        raise InvalidParameter(f"n ({params.n}) must not exceed beam_width ({width})", parameter="n")
    if not params.is_greedy:
        raise InvalidParameter(
            f"temperature must be 0 with use_beam_search, got {params.temperature:g}: a beam search draws nothing",
            parameter="temperature",
        )
    for name, default in _NOT_FOR_BEAMS.items():
        if getattr(params, name) not in (default, [], {}):
            raise UnsupportedFeature(
                f"{name} does not go with use_beam_search: beams are ranked by the model's own logprobs, and it "
                f"would change or ignore them. Leave out one of the two.",
                parameter=name,
            )


def _normalise(params: SamplingParams) -> None:
    """Bring equal meanings to one form, so that later code has one case to handle."""
    warnings = []
    changes: dict[str, object] = {}
    if params.is_greedy:
        changes.update(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    elif params.temperature < MIN_TEMPERATURE:
        warnings.append(f"temperature {params.temperature:g} raised to {MIN_TEMPERATURE}; use 0 for greedy decoding")
        changes["temperature"] = MIN_TEMPERATURE
    if params.use_beam_search and params.beam_width is None:
        changes["beam_width"] = params.n
    if params.top_k == -1:
        changes["top_k"] = 0
    for name in ("seed", "thinking_token_budget"):
        if getattr(params, name) == -1:
            changes[name] = None
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        value = getattr(params, name)
        if isinstance(value, list):
            changes[name] = list(dict.fromkeys(value))
    if params.logit_bias:
        clamped = {token: max(-100.0, min(100.0, bias)) for token, bias in params.logit_bias.items()}
        if clamped != params.logit_bias:
            warnings.append("logit_bias values outside [-100, 100] were clamped")
        changes["logit_bias"] = clamped
    changes["warnings"] = tuple(warnings)
    for name, value in changes.items():
        object.__setattr__(params, name, value)
