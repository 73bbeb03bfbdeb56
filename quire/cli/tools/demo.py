"""The tools of the demonstration: harmless functions that `quire chat --tools demo` offers and runs.

The embedded model is trained with exactly these (`tools/tiny/tool_data.py`); the console has them too (`tools.js`).
"""

from __future__ import annotations

import datetime
import json
import zoneinfo
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.cli.tools.arithmetic import ArithmeticMistake, evaluate
from quire.config.json_file import parse_json
from quire.errors import shown

MAX_ARGUMENT = 200
"""Characters of one argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTool:
    """A function of one text, with the name of its parameter."""

    name: str
    description: str
    parameter: str
    run: Callable[[str], str]
    """Raises: ValueError with what to tell the model."""

    def definition(self) -> dict[str, Any]:
        """The tool as a request offers it."""
        parameters = {
            "type": "object",
            "properties": {self.parameter: {"type": "string"}},
            "required": [self.parameter],
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def get_time(timezone: str, now: datetime.datetime | None = None) -> str:
    """The time in a zone of the IANA database, at `now` or at present.

    Raises: ValueError.
    """
    try:
        zone = zoneinfo.ZoneInfo(timezone)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise ValueError(f"there is no time zone {shown(timezone)}; names look like Europe/Paris") from None
    return f"{(now or datetime.datetime.now(datetime.UTC)).astimezone(zone):%H:%M on %A %Y-%m-%d}"


TOOLS = {
    tool.name: tool
    for tool in (
        DemoTool(
            name="calculate", description="Compute an arithmetic expression.", parameter="expression", run=evaluate
        ),
        DemoTool(name="get_time", description="The time in a time zone.", parameter="timezone", run=get_time),
    )
}


def run_tool(name: str, arguments: str) -> str:
    """What a call of the model gives; mistakes are told to the model as text that begins with `error:`."""
    tool = TOOLS.get(name)
    if tool is None:
        return f"error: there is no tool {shown(name)}; there are {', '.join(TOOLS)}"
    try:
        return tool.run(_argument(tool, arguments))
    except (ArithmeticMistake, ValueError) as error:
        return f"error: {error}"


def _argument(tool: DemoTool, arguments: str) -> str:
    """The one argument. Raises: ValueError."""
    wanted = f'the arguments must look like {{"{tool.parameter}": "..."}}'
    try:
        fields = parse_json(arguments)
    except ValueError:
        raise ValueError(f"the arguments are no JSON; {wanted}") from None
    if not isinstance(fields, Mapping) or set(fields) != {tool.parameter}:
        raise ValueError(wanted)
    value = fields[tool.parameter]
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) > MAX_ARGUMENT:
        raise ValueError(f"{tool.parameter} has {len(text)} characters, {MAX_ARGUMENT} are allowed")
    return text
