"""`quire help [COMMAND]`: the same text as `quire COMMAND --help`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    from quire.cli.parser import COMMANDS

    parser.add_argument("topic", nargs="?", choices=list(COMMANDS), metavar="COMMAND", help="a command of quire")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the help of a command, or of all."""
    from quire.cli.parser import create_parser

    create_parser(args.topic or "help").parse_args([args.topic, "--help"] if args.topic else ["--help"])
    return 0
