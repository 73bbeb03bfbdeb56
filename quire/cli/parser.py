"""The parser of all commands. Each command is imported for its flags when it is called, so that `--help` is instant."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any, NoReturn

from quire import __version__

COMMANDS = {
    "serve": "serve a model over HTTP, with OpenAI's, Anthropic's and Ollama's APIs",
    "run": "answer or continue a prompt with a model, or open a chat with it",
    "chat": "talk to a model in the terminal",
    "pull": "download a model from the Hugging Face hub",
    "list": "list the models on this machine",
    "models": "list the families of models that quire can run",
    "show": "show what a model is and the memory it needs here, without loading it",
    "plan": "say what memory a model will take and what fits, without loading it",
    "quantize": "write a checkpoint with quantised weights",
    "simulate": "say how engines would serve requests, without computing them",
    "rm": "delete downloaded models",
    "complete": "complete prompts with a model that is served",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "trace": "save a trace of the last steps of a server, for ui.perfetto.dev",
    "replay": "give the answer of a receipt again, and say whether it is the same",
    "bench": "measure latency, throughput, start-up or a server",
    "completion": "print a script that completes commands and flags in a shell",
    "env": "what this machine offers and what quire makes of it",
    "help": "show the help of a command",
}
COMMON_SHORT_FLAGS = {
    "-p": "write the prompt without a flag",
    "-f": "use standard input: quire run < FILE",
    "-t": "use --num-threads",
    "-s": "use --sampling-seed",
    "-ngl": "leave it out: quire computes on the CPU",
    "-b": "use --max-num-batched-tokens",
    "-np": "use --max-num-seqs",
    "-n": "use --max-tokens of `quire run`; a server takes max_tokens from each request",
    "-c": "use --max-model-len where a model is loaded",
    "-m": "use --model",
}
"""Short flags of llama.cpp that a command does not have, and what to do instead."""

MAX_FLAGS_IN_USAGE = 20
"""Spellings of flags, up to which a usage line shows them all."""


class Parser(argparse.ArgumentParser):
    """Takes flags only as they are spelled, and says which known one an unknown one resembles."""

    words: str | None = None
    """Attribute that collects words wherever they stand among the flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, but flags that are left over are an error of the subcommand that does not know them."""
        for word in args or () if self._subparsers is None else ():
            if word in COMMON_SHORT_FLAGS and word not in self._option_string_actions:
                self._refuse(word)  # else argparse takes -ngl for -n with the value "gl", and -p for -pp
            if word == "--":
                break
        namespace, rest = super().parse_known_args(args, namespace)
        unknown = next((word for word in rest if word.startswith("-")), None)
        if unknown is not None:
            self._refuse(unknown.partition("=")[0])
        if self.words is not None:
            vars(namespace)[self.words] = [*(vars(namespace)[self.words] or ()), *rest]
            rest = []
        return namespace, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As in argparse, with the nearest known value."""
        from quire.utils.lazy import nearest

        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        what = "command" if isinstance(action, argparse._SubParsersAction) else "choice"
        raise argparse.ArgumentError(
            action, f"invalid {what}: {str(value)[:80]!r}{nearest(str(value), known)} (choose from {', '.join(known)})"
        )

    def format_help(self) -> str:
        """As in argparse, but a usage line does not repeat the flags where there are many."""
        if self.usage is None and len(self._option_string_actions) > MAX_FLAGS_IN_USAGE:
            self.usage = " ".join(["%(prog)s", *filter(None, map(_in_usage, self._actions)), "[flags]"])
        return super().format_help()

    def _print_message(self, message: str, file: Any = None) -> None:
        """As in argparse, but an output that cannot be written is an error."""
        print(message, end="", file=file or sys.stderr)

    def _refuse(self, flag: str) -> NoReturn:
        from quire.utils.lazy import nearest

        known = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        hint = COMMON_SHORT_FLAGS.get(flag)
        self.error(f"{flag} is no flag{f'; {hint}' if hint else nearest(flag, known)}")

    def error(self, message: str) -> NoReturn:
        """One paragraph; the flags are for --help. Where a command is missing, the help, which lists them."""
        if self._subparsers is not None and message.startswith("the following arguments are required"):
            self.exit(2, self.format_help())
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists what there is)\n")


def _in_usage(action: argparse.Action) -> str:
    """What must be given, or stands without a flag; nothing for other flags."""
    name = str(action.metavar or action.dest)
    if action.option_strings:
        return f"{action.option_strings[0]} {name}" if action.required else ""
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def create_parser(only: str | None = None) -> Parser:
    """The parser with the flags of every command, or of one: each is imported for its flags."""
    parser = Parser(prog="quire", description="LLM inference: the same request gives the same tokens.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command, help_text in COMMANDS.items():
        child = commands.add_parser(command, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        if only in (None, command):
            importlib.import_module(f"quire.cli.commands.{command.replace('-', '_')}").add_arguments(child)
    return parser
