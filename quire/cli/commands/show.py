"""`quire show NAME`: what a model is, and the memory it needs on this machine, without loading it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.config.arch import ModelArch
from quire.config.flags.args import EMBEDDED, EngineArgs, add_flags, from_namespace
from quire.config.layers.recurrent_mixers import RecurrentSpec
from quire.config.memory.plan import gib
from quire.config.memory.weights.shapes import num_active_parameters, num_parameters
from quire.errors import ConfigError
from quire.loader.names import hub_name, short_name_of

if TYPE_CHECKING:
    from quire.config.engine import QuireConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help=f"directory, org/name, org/name:TAG or short name; {EMBEDDED} if absent"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser, skip=("model",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; a model that is not on this machine has only its config.json or GGUF header fetched.

    Raises: ConfigError.
    """
    if args.name is not None:
        args.model = args.name
    report = report_of(from_namespace(args))
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for name, value in report.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, entry in value.items():
                print(f"  {key:<20} {entry}")
        else:
            print(f"{name:<22} {value}")
    return 0


def report_of(args: EngineArgs) -> dict[str, Any]:
    """Name -> value, for people and as JSON.

    Raises: ConfigError.
    """
    from quire.engine.core_startup import create_config, read_arch
    from quire.loader.gguf.download import is_description
    from quire.loader.hub import is_complete

    path = config_directory(args)
    arch = read_arch(args, path)
    memory: Mapping[str, int] = {}
    try:
        config = create_config(args, (path, path))
        here, memory = _here(config), config.memory_plan
    except ConfigError as error:
        here = f"does not run with these options: {error.message}"
    name = str(hub_name(args.model or EMBEDDED) or args.model or EMBEDDED)
    is_here = is_complete(path) and not is_description(path)
    return {
        "model": name,
        "short name": short_name_of(name) or "-",
        "directory": "-" if is_description(path) else str(path),
        "downloaded": "yes" if is_here else f"no; quire pull {args.model}",
        "architecture": arch.architecture,
        "parameters": _parameters(arch),
        "context": f"{arch.max_position_embeddings} tokens",
        "checkpoint dtype": arch.dtype,
        "vocabulary": f"{arch.vocab_size} tokens",
        "layers": f"{arch.num_layers} of width {arch.hidden_size}, {_mixers(arch)}",
        "here": here,
        "memory plan": {name: gib(size) for name, size in memory.items()},
    }


def _mixers(arch: ModelArch) -> str:
    """What the layers have."""
    heads = f"{arch.num_heads} ({arch.num_kv_heads} KV) heads"
    if not arch.recurrences:
        return heads
    count = sum(any(isinstance(mixer, RecurrentSpec) for mixer in layer.mixers) for layer in arch.layers)
    recurrent = f"{count} recurrent"
    return f"{recurrent}, {len(arch.attentions)} with {heads}" if arch.attentions else recurrent


def config_directory(args: EngineArgs) -> Path:
    """Where config.json or the GGUF file of a model is. Of one that is not on this machine, only config.json or the
    header is fetched.
    """
    from quire.engine.core_startup import locate
    from quire.loader.hub import cached, check_config, checked_name, describe

    if args.model in (None, EMBEDDED) or Path(str(args.model)).expanduser().exists():
        return locate(args)[0]
    model = checked_name(str(args.model))
    path = cached(model, args.revision)
    if path is None:
        return describe(model, args.revision)
    if path.is_dir():
        check_config(path / "config.json")
    return path


def _here(config: QuireConfig) -> str:
    model, cache = config.model_config, config.cache_config
    return f"runs as {model.dtype}, context {model.max_model_len} tokens, KV cache {cache.capacity}"


def _parameters(arch: ModelArch) -> str:
    total, active = num_parameters(arch), num_active_parameters(arch)
    return _count(total) if active == total else f"{_count(total)}, of which a token meets {_count(active)}"


def _count(number: int) -> str:
    value, unit = (number / 1e9, "billion") if number >= 1e9 else (number / 1e6, "million")
    return f"{value:.3g} {unit}"
