"""Fields of messages, content parts and calls that have no meaning here and that the chat template does not read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from quire.errors import shown
from quire.tokenizer.chat import REASONING_FIELDS, ChatTemplate
from quire.utils.lazy import nearest

MAX_SHOWN = 64
"""Characters of an unknown name that are shown."""
MAX_WARNINGS = 100
MAX_HINTS = 10
"""Unknown names for which the nearest known one is looked up."""

OF_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", *REASONING_FIELDS)
OF_CALL = ("id", "type", "function")
OF_FUNCTION = ("name", "arguments")
OF_PART = ("type", "text", "refusal")
SENT_BACK = frozenset(
    {
        "annotations",
        "cache_control",
        "citations",
        "id",
        "index",
        "logprobs",
        "parsed",
        "parsed_arguments",
        "phase",
        "provider_specific_fields",
        "reasoning_details",
        "status",
        "thinking_blocks",
        "type",
    }
)
"""Fields of earlier answers that clients (OpenAI's, LangChain, LiteLLM, pydantic-ai) send back with them, and that say
nothing that is not in other fields, or nothing to the model."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A field that is not known."""

    path: str
    """As in `tools[0].foo`."""
    known: Collection[str] = ()
    """Names that it may have been meant to be."""

    @property
    def hint(self) -> str:
        """The nearest known name, as `; did you mean 'x'?`."""
        return nearest(self.path.rpartition(".")[2], list(self.known))

    def at(self, path: str) -> Unknown:
        """The same field under another path."""
        return replace(self, path=path)


def unknown_in(given: Any, place: str, known: Collection[str]) -> list[Unknown]:
    """The fields of an object that are not known, with the place that they have in a request."""
    names = given if isinstance(given, Mapping) else ()
    return [Unknown(f"{place}.{name[:MAX_SHOWN]}", known) for name in names if name not in known]


def unknown_in_messages(messages: Sequence[Any], template: ChatTemplate) -> list[Unknown]:
    """Those of messages, their content parts and their calls. Empty ones and `SENT_BACK` are not among them, nor what
    the template reads. At most `MAX_WARNINGS`."""
    each = (_in_message(message, f"messages[{index}]", template) for index, message in enumerate(messages))
    return list(islice(chain.from_iterable(each), MAX_WARNINGS))


def _in_message(message: Any, place: str, template: ChatTemplate) -> Iterator[Unknown]:
    yield from _unread(message, place, OF_MESSAGE, lambda name: template.reads(name, "message"))
    for name, each in (("content", _in_part), ("tool_calls", _in_call)):
        values = message.get(name) if isinstance(message, Mapping) else None
        for index, value in enumerate(values if isinstance(values, list) else ()):
            yield from each(value, f"{place}.{name}[{index}]", template)


def _in_part(part: Any, place: str, _: ChatTemplate) -> Iterator[Unknown]:
    """Only the text of a part reaches a template."""
    yield from _unread(part, place, OF_PART, lambda _: False)


def _in_call(call: Any, place: str, template: ChatTemplate) -> Iterator[Unknown]:
    yield from _unread(call, place, OF_CALL, lambda name: template.reads(name, "call"))
    if isinstance(call, Mapping):
        function = call.get("function")
        yield from _unread(function, f"{place}.function", OF_FUNCTION, lambda name: template.reads(name, "function"))


def _unread(given: Any, place: str, known: Collection[str], reads: Callable[[str], bool]) -> Iterator[Unknown]:
    for name, value in given.items() if isinstance(given, Mapping) else ():
        is_empty = value is None or value in ("", [], {})
        if not (is_empty or name in known or name in SENT_BACK or reads(name)):
            yield Unknown(f"{place}.{name[:MAX_SHOWN]}", known)


def warnings_of(unknown: Sequence[Unknown]) -> list[str]:
    """A warning for each, at most `MAX_WARNINGS`."""
    hints = [field.hint for field in unknown[:MAX_HINTS]] + [""] * MAX_WARNINGS
    named = zip(unknown[:MAX_WARNINGS], hints, strict=False)
    return [f"unknown parameter {shown(field.path)} has no effect{hint}" for field, hint in named]
