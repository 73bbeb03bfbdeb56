"""`quire models [WORD ...]`: the families of models that run, whatever is on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from quire.cli.output import printable
from quire.errors import ConfigError
from quire.utils.lazy import nearest

if TYPE_CHECKING:
    from quire.config.catalogue import Family

WIDE = 320
"""Columns of a table that nobody folds: a file or a pipe."""
HOW = """\
A model runs if config.json names one of these architectures. `quire list` lists the models on this machine, `quire show
NAME` says what one model is. Packages can add families: those of installed ones are listed, too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = f"{parser.description}\n\n{HOW}"
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only families with every WORD in a name, the kind or the package"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one row for each family.

    Raises: ConfigError when there is none with these words.
    """
    from quire.config.catalogue import catalogue

    known = catalogue()
    rows = [family for family in known if all(_has(family, word) for word in args.words)]
    if not rows:
        raise ConfigError(_nothing(args.words, known))
    if args.json:
        for family in rows:
            print(json.dumps(asdict(family)))
    else:
        _print(rows)
    return 0


def _has(family: Family, word: str) -> bool:
    texts = (family.name, family.model_type, family.architecture, family.kind, family.package)
    return any(word.lower() in text.lower() for text in texts if text)


def _nothing(words: list[str], known: list[Family]) -> str:
    names = [name for family in known for name in (family.model_type, family.architecture) if name]
    return (
        f"no family of models has {' and '.join(map(repr, words))} in its names{nearest(words[0].lower(), names)} "
        "(quire models lists all, and quire show NAME says what one model is)"
    )


def _print(rows: list[Family]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("family", "model_type", "architecture", "kind", "how it differs", box=None, pad_edge=False)
    for family in rows:
        cells = (family.name, family.model_type or "any", family.architecture, family.kind or "-", _about(family))
        table.add_row(*map(printable, cells))
    Console(width=None if sys.stdout.isatty() else WIDE, highlight=False, markup=False).print(table)


def _about(family: Family) -> str:
    text = f"cannot be used: {family.problem}" if family.problem else family.about
    if family.refused:
        text += f" (not with {', '.join(family.refused)})"
    return text if family.package == "quire" else f"{text} [{family.package}]".lstrip()
