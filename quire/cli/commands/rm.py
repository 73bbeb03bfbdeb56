"""`quire rm NAME`: delete downloaded models."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.config.memory.plan import gib
from quire.errors import ConfigError, ModelNotFound
from quire.loader.names import hub_name
from quire.utils.lazy import nearest

if TYPE_CHECKING:
    from quire.loader.hub_cache import CachedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="org/name (all of it), org/name:TAG or a short name")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Delete, after asking; 1 when the answer is no.

    Raises: ModelNotFound when a model is not on this machine, and then none is deleted.
    """
    from quire.loader.hub_cache import delete

    chosen = list({name: _find(name) for name in args.names}.values())
    if not args.yes and not _confirmed(chosen):
        print("nothing was deleted", file=sys.stderr)
        return 1
    for model in chosen:
        delete(model)
        print(f"deleted {model.name} ({gib(model.num_bytes)})")
    return 0


def _find(name: str) -> CachedModel:
    from quire.loader.hub_cache import cached_models, find_cached

    meant = hub_name(name)
    found = None if meant is None else find_cached(meant)
    if found is None:
        hint = nearest(str(meant or name), [str(model.name) for model in cached_models()])
        raise ModelNotFound(f"{name} is not on this machine{hint} (quire list -a shows all)")
    return found


def _confirmed(models: list[CachedModel]) -> bool:
    names = ", ".join(f"{model.name} ({gib(model.num_bytes)})" for model in models)
    if not sys.stdin.isatty():
        raise ConfigError(f"would delete {names}, and nobody can be asked here; add -y")
    print(f"Delete {names} from the cache that other programs use, too? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
