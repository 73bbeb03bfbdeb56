"""`quire run "prompt"`: offline generation, the quickest first contact."""

from __future__ import annotations

import argparse
import sys

from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.terminal import read_text, stream
from quire.config.args import add_flags, from_namespace
from quire.errors import InvalidParameter
from quire.log import set_default_level

DEFAULT_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument("prompt", nargs="?", help="text to continue; read from standard input when left out")
    parser.add_argument("--chat", action="store_true", help="ask it as a user's message instead of continuing it")
    parser.add_argument("--stats", action="store_true", help="say how many tokens and how fast")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the start-up log")
    add_sampling_flags(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Stream one completion to standard output; an interrupted one ends with 130.

    Raises: QuireError.
    """
    if not args.verbose:
        set_default_level("WARNING")
    prompt = args.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise InvalidParameter('give a prompt: quire run "The standard library"', parameter="prompt")
        prompt = read_text(sys.stdin.read)
    from quire.llm import LLM

    with LLM.from_engine_args(from_namespace(args)) as llm:
        params = sampling_params(args, llm.get_default_sampling_params(), DEFAULT_MAX_TOKENS)
        if args.chat:
            answer = stream(llm.engine, "run", llm.chat_prompt([{"role": "user", "content": prompt}]), params)
        else:
            answer = stream(llm.engine, "run", prompt, params, echo=prompt)
        sys.stdout.write("\n")
        if args.stats:
            print(answer.line(), file=sys.stderr)
    return answer.status
