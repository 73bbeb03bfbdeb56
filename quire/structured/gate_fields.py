"""`gate_of`: a `Gate` from what somebody hands in, checked and bounded. The model's tokens are checked elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from quire.errors import InvalidParameter, shown
from quire.structured.grammar import Gate, Marker, Thinking
from quire.utils.lazy import nearest
from quire.utils.unicode import check_unicode

T = TypeVar("T")
PLACE = "gate"
MAX_TRIGGERS = 64
MAX_CHARACTERS = 256
"""Of the text of a marker."""
MAX_OPENINGS = 128
MAX_FORCED = 64
MAX_BUDGET = 2**31 - 1


def gate_of(given: object) -> Gate:
    """The gate of such an object or of a mapping of its fields.

    Raises: InvalidParameter naming the field, the value and the limit.
    """
    read = _fields(Gate, PLACE, given)
    thinking = read["thinking"]
    for name in ("repeats", "is_open", "takes_triggers"):
        if not isinstance(read[name], bool):
            raise _wrong(f"{PLACE}.{name}", "True or False", read[name])
    gate = Gate(
        thinking=None if thinking is None else _thinking(f"{PLACE}.thinking", thinking),
        triggers=tuple(_list(f"{PLACE}.triggers", read["triggers"], MAX_TRIGGERS, _marker)),
        repeats=read["repeats"],
        is_open=read["is_open"],
        takes_triggers=read["takes_triggers"],
        openings=tuple(_list(f"{PLACE}.openings", read["openings"], MAX_OPENINGS, _opening)),
    )
    if gate.thinking is None and not gate.triggers and not gate.openings:
        raise InvalidParameter(f"{PLACE} needs thinking, triggers or openings; got none of them", parameter=PLACE)
    for name in ("is_open", "takes_triggers"):
        if getattr(gate, name) and not gate.triggers:
            raise InvalidParameter(
                f"{PLACE}.{name} is about triggers, so it needs {PLACE}.triggers; got none", parameter=f"{PLACE}.{name}"
            )
    return gate


def check_gate(gate: Gate, thinking_token_budget: int | None, *, has_form: bool) -> None:
    """Check a gate against the fields beside it; `has_form`: there are structured_outputs.

    Raises: InvalidParameter.
    """
    for name, given in (("triggers", gate.triggers), ("openings", gate.openings)):
        if given and not has_form:
            raise InvalidParameter(
                f"{PLACE}.{name} needs structured_outputs: what must follow them. Give it, or leave out the {name}.",
                parameter=f"{PLACE}.{name}",
            )
    budget = None if gate.thinking is None else gate.thinking.budget
    if len({thinking_token_budget, budget} - {None, -1}) > 1:
        raise InvalidParameter(
            f"thinking_token_budget ({thinking_token_budget}) and {PLACE}.thinking.budget ({budget}) must not differ; "
            "give one of them",
            parameter="thinking_token_budget",
        )


def _thinking(place: str, given: object) -> Thinking:
    read = _fields(Thinking, place, given)
    budget, is_open = read["budget"], read["is_open"]
    if not isinstance(is_open, bool):
        raise _wrong(f"{place}.is_open", "True or False", is_open)
    if budget is not None:
        budget = _number(f"{place}.budget", budget, MAX_BUDGET)
    forced = _list(f"{place}.forced", read["forced"], MAX_FORCED, _token_id)
    if budget is not None and not forced:
        raise InvalidParameter(
            f"{place}.budget needs {place}.forced: the tokens that end the thinking when the budget is used up",
            parameter=f"{place}.forced",
        )
    return Thinking(
        begin=_marker(f"{place}.begin", read["begin"]),
        end=_marker(f"{place}.end", read["end"]),
        is_open=is_open,
        budget=budget,
        forced=tuple(forced),
        before=tuple(_list(f"{place}.before", read["before"], MAX_FORCED, _token_id)),
    )


def _marker(place: str, given: object) -> Marker:
    read = _fields(Marker, place, given)
    text, token_id = _text(f"{place}.text", read["text"]), read["token_id"]
    return Marker(text=text, token_id=None if token_id is None else _token_id(f"{place}.token_id", token_id))


def _text(place: str, given: object) -> str:
    if not isinstance(given, str):
        raise _wrong(place, "a string", given)
    if not 0 < len(given) <= MAX_CHARACTERS:
        raise InvalidParameter(f"{place} must have 1 to {MAX_CHARACTERS} characters, got {len(given)}", parameter=place)
    check_unicode(given, place)
    return given


def _opening(place: str, given: object) -> str:
    text = _text(place, given)
    if text[:2].split() != [text[:2]]:
        raise InvalidParameter(
            f"{place} must have no white space among its first two characters, got {shown(text)}", parameter=place
        )
    return text


def _token_id(place: str, given: object) -> int:
    return _number(place, given, 2**31 - 1)


def _number(place: str, given: object, limit: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise _wrong(place, "an integer", given)
    if not 0 <= given <= limit:
        raise InvalidParameter(f"{place} must be in [0, {limit}], got {shown(given)}", parameter=place)
    return given


def _list(place: str, given: object, limit: int, read: Callable[[str, object], T]) -> list[T]:
    if not isinstance(given, (list, tuple)):
        raise _wrong(place, "a list", given)
    if len(given) > limit:
        raise InvalidParameter(f"{place} holds {len(given)} entries, the limit is {limit}", parameter=place)
    return [read(f"{place}[{index}]", entry) for index, entry in enumerate(given)]


def _fields(kind: type[Any], place: str, given: object) -> dict[str, Any]:
    """The value of each field, or its default."""
    known = {field.name: field.default for field in fields(kind)}
    if isinstance(given, kind):
        return {name: getattr(given, name) for name in known}
    if not isinstance(given, Mapping):
        raise _wrong(place, f"a {kind.__name__} or a mapping of its fields", given)
    if len(given) > len(known):
        raise InvalidParameter(
            f"{place} holds {len(given)} fields, a {kind.__name__} has {len(known)}", parameter=place
        )
    for name in given:
        if name not in known:
            raise InvalidParameter(
                f"{place} has no field {shown(name)}{nearest(str(name), list(known))}",
                parameter=f"{place}.{name}"[:200],
            )
    missing = [name for name, default in known.items() if default is MISSING and name not in given]
    if missing:
        raise InvalidParameter(f"{place} needs the field {missing[0]}", parameter=f"{place}.{missing[0]}")
    return {**known, **given}


def _wrong(place: str, expected: str, value: object) -> InvalidParameter:
    return InvalidParameter(f"{place} must be {expected}, got {shown(value)} ({type(value).__name__})", parameter=place)
