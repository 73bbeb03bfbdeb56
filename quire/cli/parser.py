"""The parser of all commands. Each command is imported for its flags when it is called, so that `--help` is instant."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any, NoReturn

from quire import __version__

COMMANDS = {
    "serve": "serve a model over HTTP, with the API of OpenAI",
    "run": "complete a prompt with a model, here and now",
    "chat": "talk to a model in the terminal",
    "complete": "complete prompts with a model that is served",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "replay": "give the answer of a receipt again, and say whether it is the same",
    "bench": "measure latency, throughput, start-up or a server",
    "completion": "print a script that completes commands and flags in a shell",
    "env": "what this machine offers and what quire makes of it",
}


class Parser(argparse.ArgumentParser):
    """Takes flags only as they are spelled, and says which known one an unknown one resembles."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but flags that are left over are an error of the subcommand that does not know them."""
        namespace, rest = super().parse_known_args(args, namespace)
        unknown = next((word for word in rest if word.startswith("-")), None)
        if unknown is not None:
            self._refuse(unknown.partition("=")[0])
        return namespace, rest

    def _print_message(self, message: str, file: Any = None) -> None:
        """As in argparse, but an output that cannot be written is an error."""
        print(message, end="", file=file or sys.stderr)

    def _refuse(self, flag: str) -> NoReturn:
        from quire.utils.lazy import nearest

        known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        self.error(f"{flag} is no flag{nearest(flag, known)}")

    def error(self, message: str) -> NoReturn:
        """One paragraph; the flags are for --help."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists what there is)\n")


def create_parser(only: str | None = None) -> Parser:
    """The parser with the flags of every command, or of one: each is imported for its flags."""
    parser = Parser(prog="quire", description="LLM inference: the same request gives the same tokens.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, help_text in COMMANDS.items():
        child = commands.add_parser(command, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if only in (None, command):
            importlib.import_module(f"quire.cli.{command.replace('-', '_')}").add_arguments(child)
    return parser
