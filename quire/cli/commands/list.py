"""`quire list`: the models on this machine."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from quire.config.flags.args import EMBEDDED
from quire.config.memory.plan import gib
from quire.errors import ConfigError
from quire.loader.names import short_name_of

if TYPE_CHECKING:
    from quire.loader.hub_cache import CachedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.description = f"{parser.description} `quire models` lists what could run."
    parser.add_argument("-a", "--all", action="store_true", help="also list what quire cannot run, and why")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line for each model.

    Raises: MissingDependency.
    """
    from quire.loader.hub_cache import cached_models

    rows: list[dict[str, Any]] = [
        {
            "name": str(model.name),
            "short_name": short_name_of(str(model.name)),
            "bytes": model.num_bytes,
            "modified": time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_at)),
            "problem": problem,
        }
        for model in cached_models()
        if (problem := problem_of(model)) is None or args.all
    ]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    width = max(len(row["name"]) for row in [*rows, {"name": EMBEDDED}]) + 2
    print(f"{'NAME':<{width}}{'SHORT NAME':<22}{'SIZE':<11}MODIFIED")
    print(f"{EMBEDDED:<{width}}{'':<22}{'embedded':<11}")
    for row in rows:
        note = f"  ({row['problem']})" if row["problem"] else ""
        size = gib(row["bytes"])
        print(f"{row['name']:<{width}}{row['short_name'] or '':<22}{size:<11}{row['modified']}{note}")
    return 0


def problem_of(model: CachedModel) -> str | None:
    """Why quire cannot run what is in the cache, None when it can."""
    from quire.loader.hub import check_config, has_all_files

    if model.gguf is not None:
        return None if not model.gguf.missing else "not complete; quire pull continues"
    if model.snapshot is None or not (model.snapshot / "config.json").is_file():
        return "no config.json"
    try:
        check_config(model.snapshot / "config.json")
    except ConfigError as error:
        return error.message.partition(": ")[2].partition(". ")[0]
    return None if has_all_files(model.name, model.snapshot) else "not complete; quire pull continues"
