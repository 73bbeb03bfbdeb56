"""`quire rm NAME`: delete downloaded models."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.config.memory.plan import gib
from quire.errors import ConfigError, ModelNotFound
from quire.loader.names import repository_of
from quire.utils.lazy import nearest

if TYPE_CHECKING:
    from quire.loader.hub_cache import CachedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="org/name or a short name, as `quire list` shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Delete, after asking; 1 when the answer is no.

    Raises: ModelNotFound when a model is not on this machine, and then none is deleted.
    """
    from quire.loader.hub_cache import cached_models, delete

    here = {model.repository: model for model in cached_models()}
    chosen = list({name: _find(name, here) for name in args.names}.values())
    if not args.yes and not _confirmed(chosen):
        print("nothing was deleted", file=sys.stderr)
        return 1
    for model in chosen:
        delete(model)
        print(f"deleted {model.repository} ({gib(model.num_bytes)})")
    return 0


def _find(name: str, here: dict[str, CachedModel]) -> CachedModel:
    repository = repository_of(name)
    if repository not in here:
        raise ModelNotFound(f"{name} is not on this machine{nearest(repository, list(here))} (quire list -a shows all)")
    return here[repository]


def _confirmed(models: list[CachedModel]) -> bool:
    names = ", ".join(f"{model.repository} ({gib(model.num_bytes)})" for model in models)
    if not sys.stdin.isatty():
        raise ConfigError(f"would delete {names}, and nobody can be asked here; add -y")
    print(f"Delete {names} from the cache that other programs use, too? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
