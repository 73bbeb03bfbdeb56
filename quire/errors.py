"""Every exception quire raises on purpose.

    QuireError
    |-- RequestError            the caller's fault (4xx): one request is refused, nothing else changes
    |   |-- InvalidParameter    a field has a wrong type or value
    |   |   `-- InvalidUnicode  its text is not Unicode
    |   |-- UnsupportedFeature  known, but not built yet or not possible here
    |   `-- PromptTooLong       the prompt does not fit the model's context
    |-- ConfigError             the operator's fault: refuses to start
    |   |-- ModelNotFound       no such directory or repository
    |   |-- CheckpointError     weights that are missing, damaged or do not fit the config
    |   |-- TokenizerError      tokenizer files that are missing or damaged
    |   `-- MissingDependency   an optional package is not installed
    `-- EngineError             ours (5xx)
        |-- EngineDeadError     the engine stopped and cannot serve
        |-- EngineUnavailable   the engine does not serve now: it starts or drains
        |-- EngineOverloaded    too much is queued already
        `-- RequestQuarantined  the engine ended whenever it ran this request

A message has three parts: what happened, the numbers, what to do. Errors cross process boundaries as
their class name and constructor keywords (`as_wire` / `from_wire`), so attributes equal the keywords.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

SHOWN_CHARACTERS = 80
"""Of a value in a message."""


class QuireError(Exception):
    """Raised by quire on purpose. RequestError: the caller's fault. EngineError: ours."""

    status = 500
    code = "internal_error"

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def as_wire(self) -> tuple[str, dict[str, Any]]:
        """(class name, constructor keywords): what another process needs to raise it again."""
        return type(self).__name__, {"message": self.message, **self.fields}

    def within(self, place: str) -> Self:
        """The same error, its message led by the place where it happened."""
        return type(self)(f"{place}: {self.message}", **self.fields)


class RequestError(QuireError):
    """The caller's fault: this request is refused, no other is touched."""

    status = 400
    code = "invalid_value"


class InvalidParameter(RequestError):
    """A field has a wrong type or value. `parameter` names it."""

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message, parameter=parameter)
        self.parameter = parameter


class InvalidUnicode(InvalidParameter):
    """A text holds half of a surrogate pair."""

    code = "invalid_unicode"


class UnsupportedFeature(RequestError):
    """A field asks for something that this build or this model cannot do. `parameter` names it."""

    code = "unsupported_parameter"

    def __init__(self, message: str, *, parameter: str) -> None:
        super().__init__(message, parameter=parameter)
        self.parameter = parameter


class PromptTooLong(RequestError):
    """The prompt (plus at least one token of output) does not fit the context."""

    code = "context_length_exceeded"

    def __init__(self, message: str, *, num_tokens: int, limit: int) -> None:
        super().__init__(message, num_tokens=num_tokens, limit=limit)
        self.num_tokens, self.limit = num_tokens, limit

    @classmethod
    def of(cls, num_tokens: int, limit: int) -> PromptTooLong:
        """The error for a prompt of `num_tokens` where the model takes `limit`, one of them kept for the answer."""
        return cls(
            f"This model's maximum context length is {limit} tokens, one of which is needed for the answer; the prompt "
            f"has {num_tokens}. Shorten the prompt to {counted(limit - 1, 'token')} or fewer, or start with a larger "
            "max_model_len if the model allows it.",
            num_tokens=num_tokens,
            limit=limit,
        )


class ConfigError(QuireError):
    """The engine cannot start as configured."""

    status = 500
    code = "invalid_configuration"


class ModelNotFound(ConfigError):
    """No such directory or repository."""


class CheckpointError(ConfigError):
    """Weights that are missing, damaged or do not fit the config."""


class TokenizerError(ConfigError):
    """Tokenizer files that are missing or damaged."""


class MissingDependency(ConfigError):
    """An optional package is not installed; the message names the extra."""


class EngineError(QuireError):
    """Our fault."""


class EngineDeadError(EngineError):
    """The engine stopped and cannot serve."""

    status = 503
    code = "engine_unavailable"


class EngineUnavailable(EngineError):
    """The engine does not serve now: it starts or drains. `retry_after` is in seconds."""

    status = 503
    code = "engine_unavailable"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, retry_after=retry_after)
        self.retry_after = retry_after


class EngineOverloaded(EngineError):
    """Too much is queued already. `retry_after` is in seconds."""

    status = 429
    code = "engine_overloaded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, retry_after=retry_after)
        self.retry_after = retry_after


class RequestQuarantined(EngineError):
    """The engine ended whenever it ran this request, alone; it is not run again."""

    code = "request_quarantined"


def shown(value: object) -> str:
    """A value as a message shows it: one short line, whatever it is. No more of it is read than is shown."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > SHOWN_CHARACTERS:
            return text[: SHOWN_CHARACTERS - 3] + "..."
    return text


def _pieces(value: object) -> Iterator[str]:
    """The parts of `repr(value)`; of a long text only the beginning."""
    if type(value) is list:
        yield from _listed("[", value, "]")
    elif type(value) is tuple:
        yield from _listed("(", value, ",)" if len(value) == 1 else ")")
    elif type(value) in (set, frozenset):
        yield from _listed("{", value, "}")  # type: ignore[arg-type]
    elif type(value) is dict:
        yield "{"
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, (str, bytes, bytearray)):
        yield repr(value[: SHOWN_CHARACTERS + 1])
    else:
        try:
            yield repr(value)
        except ValueError:  # Python refuses to write out integers of thousands of digits
            yield f"a {type(value).__name__} too large to print"


def _listed(begin: str, items: Iterable[object], end: str) -> Iterator[str]:
    yield begin
    for index, item in enumerate(items):
        yield ", " if index else ""
        yield from _pieces(item)
    yield end


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: 1 request, 2 requests."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def _tree(root: type[QuireError]) -> dict[str, type[QuireError]]:
    classes = {root.__name__: root}
    for child in root.__subclasses__():
        classes.update(_tree(child))
    return classes


def from_wire(name: str, fields: dict[str, Any]) -> QuireError:
    """The exception that `as_wire` described; an unknown name becomes an EngineError that says so."""
    cls = _tree(QuireError).get(name)
    if cls is None:
        return EngineError(f"{name}: {fields.get('message', '')}")
    return cls(**fields)
