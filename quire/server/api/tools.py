"""The tools that a request offers, and which of them the answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from quire.errors import shown
from quire.message_formats.grammars.call_grammar import MAX_TOOLS
from quire.message_formats.tools import Tool
from quire.server.http.errors import ApiError, invalid
from quire.tokenizer.unread_fields import Unknown, unknown_in
from quire.utils.lazy import nearest

MAX_DESCRIPTION = 1 << 16
_OF_FUNCTION = ("name", "description", "parameters", "strict")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Choice(StrEnum):
    """What `tool_choice` asks for."""

    AUTO = "auto"
    """The model decides."""
    NONE = "none"
    """The answer is text; what looks like a call is text, too."""
    REQUIRED = "required"
    """The answer is one call or more of the offered tools."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a request."""

    tools: Mapping[str, Tool] = field(default_factory=dict)
    """By name, those that may be called."""
    shown: Sequence[Mapping[str, Any]] = ()
    """What the chat template sees: all of them, in OpenAI's form."""
    choice: Choice = Choice.NONE
    is_named: bool = False
    """One function was asked for by its name."""
    is_parallel: bool = True
    """The answer may have several calls."""
    place: str = "tools"
    unknown: Sequence[Unknown] = ()
    """Fields of the tools and of the choice that are not known here."""

    @property
    def may_call(self) -> bool:
        """Whether the answer may have calls."""
        return self.choice is not Choice.NONE and bool(self.tools)


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[Tool],
    choice: Choice,
    names: Sequence[str] | None,
    *,
    parallel: bool | None,
    unknown: Sequence[Unknown] = (),
) -> ToolUse:
    """Tools with a choice among them; `names` are those it allows, all when None.

    Raises: ApiError for equal names, and for names that no tool has.
    """
    known: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        if tool.name in known:
            raise invalid(f"tools[{index}]", f"tools has two functions named {tool.name!r}; give each its own name.")
        known[tool.name] = tool
    for name in names or ():
        if name not in known:
            raise invalid("tool_choice", f"tool_choice names {shown(name)}, which is no tool{nearest(name, known)}.")
    allowed = known if names is None else {name: known[name] for name in names}
    return ToolUse(
        allowed,
        [_as_shown(tool) for tool in tools],
        choice,
        is_named=names is not None and len(names) == 1 and choice is Choice.REQUIRED,
        is_parallel=parallel is not False,
        unknown=unknown,
    )


def _as_shown(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def read_tool(fields: Any, place: str, *, parameters: str = "parameters") -> Tool:
    """A function's fields as APIs give them; `parameters` is the name of the one with its schema.

    Raises: ApiError naming the field.
    """
    if not isinstance(fields, Mapping):
        raise invalid(place, f"{place} must be an object that describes a function; got {shown(fields)}.")
    name = fields.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{place}.name", f"{place}.name must be 1 to 64 letters, digits, _ and -; got {shown(name)}.")
    description = fields.get("description")
    if description is not None and (not isinstance(description, str) or len(description) > MAX_DESCRIPTION):
        what = f"a text of at most {MAX_DESCRIPTION} characters"
        raise invalid(f"{place}.description", f"{place}.description must be {what}; got {shown(description)}.")
    schema = fields.get(parameters)
    if schema is not None and not isinstance(schema, Mapping):
        where = f"{place}.{parameters}"
        raise invalid(where, f"{where} must be a JSON Schema of an object; got {shown(schema)}.")
    strict = fields.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{place}.strict", f"{place}.strict must be true, false or left out; got {shown(strict)}.")
    default = {"type": "object", "properties": {}}
    return Tool(
        name=name,
        description=description or "",
        parameters=schema or default,
        place=f"{place}.{parameters}",
        strict=strict,
    )


def openai_tools(tools: Sequence[Any] | None, choice: Any, *, parallel: bool | None, is_flat: bool = False) -> ToolUse:
    """OpenAI's `tools` and `tool_choice`; `is_flat`: those of responses, whose functions stand beside their type.

    Raises: ApiError.
    """
    if tools is not None and not is_flat:
        check_count(tools)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice requires tools; send some, or leave it out.")
        return NO_TOOLS
    check_count(tools)
    found = [_openai_tool(tool, f"tools[{index}]", is_flat=is_flat) for index, tool in enumerate(tools)]
    kind, names = _openai_choice(choice, is_flat=is_flat)
    unknown = _unknown_flat(tools, choice) if is_flat else _unknown_nested(tools, choice)
    return tool_use(found, kind, names, parallel=parallel, unknown=unknown)


def _unknown_flat(tools: Sequence[Any], choice: Any) -> list[Unknown]:
    found = [name for i, tool in enumerate(tools) for name in unknown_in(tool, f"tools[{i}]", {"type", *_OF_FUNCTION})]
    is_function = isinstance(choice, Mapping) and choice.get("type") == "function"
    found += unknown_in(choice, "tool_choice", {"type", "name"} if is_function else {"type", "mode", "tools"})
    for place, tool in _each_allowed(choice, "tool_choice"):
        found += unknown_in(tool, place, {"type", "name"})
    return found


def _unknown_nested(tools: Sequence[Any], choice: Any) -> list[Unknown]:
    found = []
    for index, tool in enumerate(tools):
        found += unknown_in(tool, f"tools[{index}]", ("type", "function"))
        found += unknown_in(tool["function"], f"tools[{index}].function", _OF_FUNCTION)
    if isinstance(choice, Mapping):
        kind = choice["type"]
        known = ("name",) if kind == "function" else ("mode", "tools")
        found += unknown_in(choice, "tool_choice", ("type", kind))
        found += unknown_in(choice[kind], f"tool_choice.{kind}", known)
        for place, tool in _each_allowed(choice[kind], f"tool_choice.{kind}"):
            found += unknown_in(tool, place, ("type", "function"))
            found += unknown_in(tool.get("function"), f"{place}.function", ("name",))
    return found


def _each_allowed(given: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tools that a choice lists, each with its place."""
    tools = given.get("tools", ()) if isinstance(given, Mapping) else ()
    yield from ((f"{place}.tools[{index}]", tool) for index, tool in enumerate(tools))


def check_count(tools: Sequence[Any]) -> None:
    """Refuse a list of tools that is empty or too long. Raises: ApiError."""
    if not 0 < len(tools) <= MAX_TOOLS:
        raise invalid("tools", f"tools must have 1 to {MAX_TOOLS} items, or be left out; got {len(tools)}.")


def _openai_tool(given: Any, place: str, *, is_flat: bool) -> Tool:
    kind = given.get("type", "function") if isinstance(given, Mapping) else None
    if kind != "function":
        raise ApiError(
            400,
            "unsupported_parameter",
            f"{place}.type {shown(kind)} is not supported: only functions, which the client runs, can be called here.",
            param=f"{place}.type",
        )
    return read_tool(given, place) if is_flat else read_tool(given.get("function"), f"{place}.function")


def _openai_choice(given: Any, *, is_flat: bool) -> tuple[Choice, list[str] | None]:
    if given is None:
        return Choice.AUTO, None
    if isinstance(given, str) and given in list(Choice):
        return Choice(given), None
    if isinstance(given, Mapping) and given.get("type") == "function":
        return Choice.REQUIRED, [_name_in(given, "tool_choice", is_flat=is_flat)]
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        return _allowed_tools(given if is_flat else given.get("allowed_tools"), is_flat=is_flat)
    raise invalid(
        "tool_choice",
        f"tool_choice must be {', '.join(Choice)} or an object that names a function; got {shown(given)}.",
    )


def _name_in(given: Any, place: str, *, is_flat: bool) -> str:
    holder = given if is_flat or not isinstance(given, Mapping) else given.get("function")
    name = holder.get("name") if isinstance(holder, Mapping) else None
    if not isinstance(name, str):
        where = f"{place}.name" if is_flat else f"{place}.function.name"
        raise invalid(where, f"{where} must be the name of a tool; got {shown(name)}.")
    return name


def _allowed_tools(given: Any, *, is_flat: bool) -> tuple[Choice, list[str]]:
    tools = given.get("tools") if isinstance(given, Mapping) else None
    mode = given.get("mode", "auto") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or not 0 < len(tools) <= MAX_TOOLS:
        raise invalid(
            "tool_choice", "tool_choice of type allowed_tools must have tools, not empty, and a mode: auto or required."
        )
    for index, tool in enumerate(tools):
        if isinstance(tool, Mapping) and tool.get("type", "function") != "function":
            where = f"tool_choice.tools[{index}].type"
            raise invalid(where, f"{where} must be function; got {shown(tool['type'])}.")
    names = [_name_in(tool, f"tool_choice.tools[{index}]", is_flat=is_flat) for index, tool in enumerate(tools)]
    return Choice(mode), list(dict.fromkeys(names))
