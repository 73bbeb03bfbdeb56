"""Knobs: dataclass fields that carry their help, choices and bounds, and the command-line flags made from them.

A knob is written once. Its flag, the check of its value and its line in --help follow from the field.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import json
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import field
from numbers import Integral, Real
from typing import Any, TypeVar

from quire.errors import ConfigError, shown
from quire.utils.lazy import nearest

K = TypeVar("K")


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    short: str | None = None,
    placeholder: str | None = None,
    spellings: Mapping[str, str] | None = None,
    refusals: Mapping[str, str] | None = None,
    least: int | None = None,
    most: int = 2**63 - 1,
    is_secret: bool = False,
) -> Any:
    """A field of `EngineArgs` or `ServerSettings`. `least` and `most` bound numbers; a float without them is a share,
    above 0 and at most 1. `short` is a flag of one letter; `placeholder` stands for the value in --help; `spellings`
    are other words for a choice; `refusals` say of a known word what to use instead. No message shows a secret.
    """
    metadata: dict[str, Any] = {"help": help, "choices": choices, "aliases": aliases, "short": short}
    metadata.update(placeholder=placeholder, least=least, most=most, spellings=spellings or {}, refusals=refusals or {})
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata, repr=not is_secret)


def short_repr(value: Any) -> str:
    """A dataclass as the call that makes it: only fields that differ from their defaults, and no secrets."""
    changed = []
    for option in dataclasses.fields(value):
        factory: Any = option.default_factory
        default = option.default if factory is dataclasses.MISSING else factory()
        if option.repr and getattr(value, option.name) != default:
            changed.append(f"{option.name}={getattr(value, option.name)!r}")
    return f"{type(value).__name__}({', '.join(changed)})"


def signature_of(cls: Any) -> inspect.Signature:
    """What a dataclass takes, for the help of editors and notebooks; its `__new__` would hide it."""
    signature = inspect.signature(cls.__init__)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def read_knobs(knobs: Any) -> None:
    """Every field of a dataclass of knobs as a plain value of its kind. Mutates knobs.

    Raises: ConfigError naming the option, the value and what is allowed.
    """
    hints = _hints_of(knobs.__class__)
    for option in dataclasses.fields(knobs):
        value = _read(option, hints[option.name], getattr(knobs, option.name))
        object.__setattr__(knobs, option.name, value)


_hints_of = functools.cache(typing.get_type_hints)


def _read(option: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """The option as a plain value of its kind; paths and the numbers of numpy are understood.

    Raises: ConfigError naming the option, the value and what is allowed.
    """
    kinds = tuple(
        typing.get_origin(kind) or kind
        for kind in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
    )
    value = _plain(value, kinds)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"option {option.name} must be {names}, got {_told(option, value)} ({type(value).__name__})")
    choices = option.metadata["choices"]
    if isinstance(value, str):
        value = option.metadata["spellings"].get(value.lower(), value)
        if value.lower() in option.metadata["refusals"]:
            raise ConfigError(f"option {option.name}={value!r} {_refusal(option, value)}")
    if choices and value is not None and value not in choices:
        raise ConfigError(
            f"option {option.name} must be one of {', '.join(choices)}, got {shown(value)}"
            f"{nearest(value, list(choices))}"
        )
    if isinstance(value, str) and not value:
        raise ConfigError(f"option {option.name} is an empty string; leave it out, or say what is meant")
    if isinstance(value, tuple) and not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"option {option.name} must hold non-empty strings, got {_told(option, list(value))}")
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise ConfigError(f"option {option.name} must have strings as keys, got {shown(list(value))}")
    _check_unicode(option, value)
    _check_range(option, value)
    return value


def _check_unicode(option: dataclasses.Field[Any], value: object) -> None:
    """Refuse text that is none, such as a path of other bytes: no message to another process could carry it.

    Raises: ConfigError.
    """
    if isinstance(value, str | tuple | dict):
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            raise ConfigError(f"option {option.name} must be text in UTF-8, got {_told(option, value)}") from None


def _refusal(option: dataclasses.Field[Any], value: str) -> str:
    """The end of a sentence that begins with the option."""
    return f"is not supported: {option.metadata['refusals'][value.lower()]}"


def _told(option: dataclasses.Field[Any], value: object) -> str:
    return shown(value) if option.repr else "what is not shown"


def _plain(value: Any, kinds: tuple[Any, ...]) -> Any:
    if isinstance(value, bool):
        return value
    if int in kinds and isinstance(value, Integral):
        return int(value)
    if float in kinds and isinstance(value, Real):
        with contextlib.suppress(OverflowError):
            return float(value)
    if str in kinds and isinstance(value, os.PathLike):
        return os.fspath(value)
    if tuple in kinds and isinstance(value, list):
        return tuple(value)
    return value


def _check_range(option: dataclasses.Field[Any], value: object) -> None:
    least, most = option.metadata["least"], option.metadata["most"]
    if isinstance(value, (int, float)) and least is not None and not value >= least:
        raise ConfigError(f"option {option.name} must be at least {least}, got {shown(value)}")
    if isinstance(value, (int, float)) and value > most:
        raise ConfigError(f"option {option.name} must be at most {most}, got {shown(value)}")
    if isinstance(value, float) and least is None and not 0 < value <= 1:
        raise ConfigError(f"option {option.name} must be in (0, 1], got {value}")


def whole_number(text: str) -> int:
    """An integer flag: `4096`, `4k` (thousand), `4K` (1024), `25.6k`, `2GiB`, `1.5G` (2**30).

    Raises: argparse.ArgumentTypeError.
    """
    if text.lstrip("+-").isdecimal() and len(text) < 100:
        return int(text)  # a float would lose digits
    units = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
    number = text.removesuffix("iB").removesuffix("B") if text[-1:] == "B" else text
    unit = units.get(number[-1:], 1)
    try:
        value = float(number[:-1] if unit > 1 else number) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 4k, 4K or 2GiB") from None
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    """A flag that holds a JSON object.

    Raises: argparse.ArgumentTypeError.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def add_knob_flags(parser: argparse.ArgumentParser, cls: Any, title: str, skip: tuple[str, ...] = ()) -> None:
    """One flag per field of a dataclass of knobs; absent flags leave no attribute: defaults stay in one place."""
    hints = typing.get_type_hints(cls)
    group = parser.add_argument_group(title)
    for option in dataclasses.fields(cls):
        if option.name in skip:
            continue
        flags = ["--" + name.replace("_", "-") for name in (option.name, *option.metadata["aliases"])]
        if option.metadata["short"] is not None:
            flags.insert(0, option.metadata["short"])
        default = {} if option.default is dataclasses.MISSING else option.default
        help_text = option.metadata["help"] + _default_text(option.name, default)
        kind = _parser_of(hints[option.name])
        if kind is bool:
            group.add_argument(
                *flags,
                dest=option.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=help_text,
            )
            continue
        repeated: dict[str, Any] = {"action": "extend", "nargs": "+"} if "tuple" in str(hints[option.name]) else {}
        choices = option.metadata["choices"] or None
        group.add_argument(
            *flags,
            dest=option.name,
            type=_word_parser(option) if choices else kind,
            default=argparse.SUPPRESS,
            choices=choices,
            metavar=None if choices else _placeholder(option, kind),
            help=help_text,
            **repeated,
        )


SECONDS = ("_timeout", "_interval", "_window", "_delay", "_pause")
"""Ends of names of knobs that are seconds."""
BYTES = ("_bytes", "_body_size", "_header_size")


def _placeholder(option: dataclasses.Field[Any], kind: Callable[[str], Any]) -> str:
    """What stands for the value in --help: its unit or its kind where the name does not end with what it is."""
    given: str | None = option.metadata["placeholder"]
    last = option.name.rpartition("_")[2].upper()
    if given is not None or kind is json_object:
        return given or "JSON"
    if option.name.endswith((*SECONDS, *BYTES)):
        return "SECONDS" if option.name.endswith(SECONDS) else "BYTES"
    if kind is float:
        return "X"
    return last if kind is str or last.endswith("S") or last == option.name.upper() else "N"


def _default_text(name: str, default: object) -> str:
    """The default as a person would write it, with its unit."""
    if default in (None, {}, ()):
        return " (default: none; seconds)" if name.endswith(SECONDS) else ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    if isinstance(default, tuple):
        return f" (default: {' '.join(map(str, default))})"
    if isinstance(default, int) and name.endswith(BYTES):
        return f" (default: {_bytes_text(default)})"
    unit = " second" if default == 1 else " seconds"
    return f" (default: {default}{unit if name.endswith(SECONDS) else ''})"


def _bytes_text(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number and number % size == 0:
            return f"{number // size}{unit}"
    return f"{number} bytes"


def _word_parser(option: dataclasses.Field[Any]) -> Callable[[str], str]:
    """Reads one of the choices, also where it is spelled in another way."""

    def word(text: str) -> str:
        if text.lower() in option.metadata["refusals"]:
            raise argparse.ArgumentTypeError(f"{text} {_refusal(option, text)}")
        spelling: str = option.metadata["spellings"].get(text.lower(), text)
        return spelling

    return word


def knobs_from_namespace(namespace: argparse.Namespace, cls: type[K]) -> K:
    """The dataclass of knobs that parsed flags describe; attributes that are not its fields are left alone."""
    names = {option.name for option in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in vars(namespace).items() if name in names})


def _parser_of(hint: Any) -> Callable[[str], Any]:
    text = str(hint)
    if "dict" in text:
        return json_object
    if "bool" in text:
        return bool
    return whole_number if "int" in text else float if "float" in text else str
