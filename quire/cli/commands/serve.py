"""`quire serve [MODEL]`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.config.flags.args import EngineArgs, add_flags
from quire.config.flags.foreign import SERVER, add_foreign_flags
from quire.config.flags.knobs import add_knob_flags, knobs_from_namespace
from quire.config.json_file import read_all
from quire.errors import ConfigError, shown

MAX_CONFIG_BYTES = 1 << 20
"""Of a file with flags."""
SHORT = {"-q": "quantization"}
"""Spellings of vLLM's that are taken and not shown."""


if TYPE_CHECKING:
    from quire.server.launch import ServeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    add_serve_flags(parser)
    parser.set_defaults(run=partial(run, parser=parser, started_at=time.monotonic()))


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """A model and everything that a server takes; `options_of` reads it."""
    from quire.engine.front.admission import AdmissionLimits
    from quire.engine.process.restart_policy import RestartPolicy
    from quire.server.settings import add_server_flags

    parser.add_argument(
        "model_tag",
        nargs="?",
        metavar="MODEL",
        help="directory, hub id (org/name) or short name (qwen3:0.6b); quire-tiny, the embedded one, if absent",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML with flags as keys; those given here win")
    add_server_flags(parser)
    add_knob_flags(parser, AdmissionLimits, "admission")
    add_knob_flags(parser, RestartPolicy, "supervision")
    add_flags(parser)
    for short, name in SHORT.items():
        parser.add_argument(short, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_foreign_flags(parser, SERVER)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser, started_at: float) -> int:
    """Serve until a signal ends it.

    Raises: QuireError when the server cannot start.
    """
    from quire.server.launch import serve

    serve(options_of(args, parser), started_at)
    return 0


def options_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> ServeOptions:
    """What the flags of `add_serve_flags` say, those of --config included. Mutates args.

    Raises: ConfigError.
    """
    from quire.engine.front.admission import AdmissionLimits
    from quire.engine.process.restart_policy import RestartPolicy
    from quire.server.launch import ServeOptions
    from quire.server.settings import settings_from_namespace

    if args.config is not None:
        for name, value in vars(parser.parse_args(flags_of_file(args.config))).items():
            if vars(args).get(name) is None:
                setattr(args, name, value)
    return ServeOptions(
        args=_engine_args(args),
        settings=settings_from_namespace(args),
        limits=knobs_from_namespace(args, AdmissionLimits),
        policy=knobs_from_namespace(args, RestartPolicy),
    )


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    given = vars(args).get("model")
    if args.model_tag is not None:
        if given not in (None, args.model_tag):
            raise ConfigError(f"the model is given twice: {args.model_tag!r} and --model {given!r}; give one")
        args.model = args.model_tag
    return knobs_from_namespace(args, EngineArgs)


def flags_of_file(path: str) -> list[str]:
    """The flags that a YAML file spells as keys and values.

    Raises: ConfigError.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            options = yaml.safe_load(read_all(file, MAX_CONFIG_BYTES).decode("utf-8"))
    except yaml.MarkedYAMLError as error:  # its text quotes the line, which may hold a key
        line = 1 + (error.problem_mark.line if error.problem_mark else 0)
        raise ConfigError(f"--config {path}: line {line}: {error.problem}") from None
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error.strerror or error}. Give a YAML file with flags as keys."
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: must map flags to values, got {shown(options)}")
    for key, value in options.items():
        if value is None or value == []:  # an --api-key whose variable was empty must not mean a server without keys
            raise ConfigError(f"--config {path}: {shown(key)} has no value; give one, or leave the line out")
    return [word for key, value in options.items() for word in _words(str(key).replace("_", "-"), value)]


def _words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
