"""`quire env`: what this machine offers, what quire makes of it, and why."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib import metadata

from quire import __version__, envs
from quire.config.flags.args import add_flags, from_namespace
from quire.config.memory.plan import gib
from quire.errors import counted

PACKAGES = ("torch", "numpy", "tokenizers", "safetensors", "jinja2", "huggingface_hub", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; the engine flags decide for which model and options the choices are shown.

    Raises: ConfigError.
    """
    from quire.engine.core_startup import create_config
    from quire.platforms.cores import allowed_cpus
    from quire.platforms.current import current_capabilities, devices
    from quire.platforms.kernel_sets import KERNEL_SETS

    engine_args = from_namespace(args)
    here = current_capabilities(engine_args.device)
    config = create_config(engine_args)
    report = {
        "quire": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": {
            "cores": f"{here.num_cores} ({counted(len(allowed_cpus()), 'logical CPU')} allowed)",
            "instruction sets": ", ".join(here.isa) or "none of interest",
            "memory": f"{gib(here.total_memory)}, {gib(here.available_memory)} available{_interleaved(here.ops)}",
            "ops": f"{here.ops} ({here.ops_reason})",
        },
        "devices": devices(),
        "kernels": KERNEL_SETS[here.ops_isa].lines() if here.ops_isa else "none: the reference ops compute",
        "choices": {name: f"{choice.value} ({choice.reason})" for name, choice in config.choices.items()},
        "memory plan": {name: gib(size) for name, size in config.memory_plan.items()},
        "environment": {
            name: f"{envs.shown_value(name, envs.get(name))}: {variable.help}"
            for name, variable in envs.VARIABLES.items()
        },
    }
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            _print(name, value)
    for warning in envs.unknown():
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def _print(name: str, value: object) -> None:
    if isinstance(value, dict):
        print(f"{name}:")
        for key, entry in value.items():
            print(f"  {key:<24} {entry}")
    else:
        print(f"{name}: {value}")


def _interleaved(ops: str) -> str:
    """What is said of a machine with several NUMA nodes."""
    from quire.platforms.cores import memory_nodes

    nodes = memory_nodes()
    if ops != "cpu" or len(nodes) < 2:
        return ""
    return f", from NUMA nodes {', '.join(map(str, nodes))} in turn"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
