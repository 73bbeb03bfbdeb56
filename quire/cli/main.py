"""`quire`: subcommands that import what they need when they are called, so that `--help` is instant."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from quire import __version__
from quire.errors import QuireError

COMMANDS = {
    "run": "complete a prompt with a model, here and now",
    "chat": "talk to a model in the terminal",
    "bench": "measure latency or throughput",
    "env": "what this machine offers and what quire makes of it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status: 0 done, 1 failed while running, 2 wrong use or configuration."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in argv if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(prog="quire", description="LLM inference: the same request gives the same tokens.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, help_text in COMMANDS.items():
        child = commands.add_parser(command, help=help_text, description=help_text.capitalize() + ".")
        if command == name:
            importlib.import_module(f"quire.cli.{command}").add_arguments(child)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1 if error.status == 500 and error.code == "internal_error" else 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
