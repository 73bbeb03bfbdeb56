"""`quire complete`: texts continued by a model that is served; `quire run` does it in this process."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.cli.output import say
from quire.cli.sampling_flags import add_sampling_flags, add_server_flags
from quire.cli.terminal.answer import read_line
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.cli.client.served import Served


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument("-q", "--quick", metavar="TEXT", help="complete one text and leave")
    parser.add_argument("--stats", action="store_true", help="say how many tokens and how fast after each answer")
    add_server_flags(parser, url="http://127.0.0.1:8000")
    parser.add_argument(
        "-m", "--model", "--model-name", metavar="NAME", help="what to ask for; the first when left out"
    )
    add_sampling_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read prompts, one a line, and stream their continuations.

    Raises: QuireError.
    """
    from quire.cli.client.served import Served

    served = Served(args, args.model)
    if args.quick is not None:
        return _complete(served, args.quick, stats=args.stats)
    interactive = sys.stdin.isatty()
    if interactive:
        say(f"{served.model}: a line is a prompt; Ctrl-D ends")
    all_done = True
    while (line := read_line(interactive)) is not None:
        if line.strip():
            all_done &= _complete(served, line.rstrip("\n"), stats=args.stats) != 1
    return 0 if all_done or interactive else 1


def _complete(served: Served, prompt: str, *, stats: bool) -> int:
    """Stream one completion; its exit status, 1 when it was refused or failed."""
    try:
        answer = served.complete(prompt, echo=prompt)
    except RequestError as error:
        say(f"\nquire: {error}")
        return 1
    print()
    if stats:
        print(answer.line(), file=sys.stderr)
    return answer.status
