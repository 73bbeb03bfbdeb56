"""One table of the `QUIRE_*` environment variables: name, type, default, one-line help."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """One environment variable: how its text becomes a value."""

    parse: Callable[[str], str]
    default: str
    help: str


_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)S?$", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def shown_value(name: str, value: str) -> str:
    """A value for people: what a name like *_KEY, *_TOKEN or *_SECRET holds, and credentials in a URL, are left out."""
    if value and _SECRET_NAME.search(name):
        return "set, not shown"
    return _CREDENTIALS.sub("***", value)


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return text

    return parse


VARIABLES: dict[str, Variable] = {
    "QUIRE_LOG_LEVEL": Variable(
        parse=_choice("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO", help="Lowest level that is logged."
    ),
    "QUIRE_LOG_FORMAT": Variable(
        parse=_choice("text", "json"), default="text", help="Lines for people, or one JSON object a line."
    ),
    "QUIRE_API_KEY": Variable(
        parse=str,
        default="",
        help="Keys that a server without --api-key demands, separated by commas; a client without one sends the first.",
    ),
    "QUIRE_CPU_ISA": Variable(
        parse=_choice(
            "auto",
            "avx2",
            "avx_vnni",
            "avx512",
            "avx512_vnni",
            "avx512_bf16",
            "amx",
            "neon",
            "neon_dotprod",
            "neon_bf16",
        ),
        default="auto",
        help="Force a lower instruction set for the native CPU kernels.",
    ),
    "QUIRE_OPS": Variable(
        parse=_choice("auto", "reference", "cpu"), default="auto", help="Which implementation of the ops to use."
    ),
}


def get(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """The value of a variable of the table, its default when unset.

    Raises: ConfigError when the text is not allowed.
    """
    variable = VARIABLES[name]
    text = environ.get(name, variable.default)
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name} is {shown_value(name, text)!r}; it must be {error}") from None


def unknown(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One warning for each `QUIRE_*` variable that nothing reads, with the nearest known name."""
    warnings = []
    for name in environ:
        if name.startswith("QUIRE_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"environment variable {name} is not known and has no effect{hint}")
    return warnings
