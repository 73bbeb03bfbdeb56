"""`quire`: the entry point. What it imports before it minds signals is kept small."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.cli.signals import SIGINT_STATUS, end_on_signals


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status.

    0: done; 1: failed while running; 2: wrong use or configuration; 128 + number: ended by a signal. Without
    `argv` this is the whole process: signals end it at once, and so does the end of the command.
    """
    if argv is not None:
        return _status(argv)
    end_on_signals()
    from quire.cli.output import end_process, open_closed_streams

    open_closed_streams()
    try:
        status = _status(sys.argv[1:])
    except SystemExit as end:  # from argparse
        status = end.code if isinstance(end.code, int) else 0
    return end_process(status)


def _status(argv: Sequence[str]) -> int:
    from quire.cli.output import report, say
    from quire.errors import QuireError

    try:
        try:
            return _run(list(argv))
        finally:
            sys.stdout.flush()
    except QuireError as error:
        say(f"quire: {error}")
        return 1 if error.status == 500 and error.code == "internal_error" else 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return SIGINT_STATUS
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else the reader has seen enough
            report(error)
        return 1


def _run(argv: list[str]) -> int:
    import io

    from quire.cli.parser import create_parser

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character gets a question mark
    name = next((word for word in argv if not word.startswith("-")), "")
    args = create_parser(name).parse_args(argv)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
