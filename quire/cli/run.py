"""`quire run [MODEL] [PROMPT]`: offline generation, the quickest first contact."""

from __future__ import annotations

import argparse
import sys

from quire.cli import chat
from quire.cli.model_name import answering, take_words
from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.terminal import read_text, stream
from quire.config.args import add_flags, from_namespace
from quire.errors import InvalidParameter
from quire.log import set_default_level

DEFAULT_MAX_TOKENS = 128
RULE = """\
With two words the first is the model and the second is the prompt. With one word it is the model if it is a directory
or a path, a short name (qwen3:0.6b), quire-tiny, or of the form org/name. Any other word is a prompt for the embedded
model. With --model every word is the prompt. Without a prompt, standard input is the prompt; on a terminal a model that
was named opens a chat."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "quire run [MODEL] [PROMPT] [flags]"
    parser.description = f"{parser.description}\n\n{RULE}"
    parser.words = "words"  # type: ignore[attr-defined]
    parser.add_argument("words", nargs="*", metavar="[MODEL] [PROMPT]", help="a model, and a text to continue")
    parser.add_argument("--chat", action="store_true", help="ask the prompt as a user's message, do not continue it")
    parser.add_argument("--stats", action="store_true", help="say how many tokens and how fast")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the start-up log")
    chat.add_display_flags(parser)
    add_sampling_flags(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Stream one completion to standard output, or open a chat; an interrupted completion ends with 130.

    Raises: QuireError.
    """
    if not args.verbose:
        set_default_level("WARNING")
    prompt = take_words(args, args.words)
    if prompt is None and sys.stdin.isatty():
        if vars(args).get("model") is None:
            raise InvalidParameter('give a prompt: quire run "The standard library"', parameter="prompt")
        return chat.run_in_process(args)
    if prompt is None:
        prompt = read_text(sys.stdin.read)
    return _complete(args, prompt)


def _complete(args: argparse.Namespace, prompt: str) -> int:
    from quire.llm import LLM

    title = answering(args)
    with LLM.from_engine_args(from_namespace(args)) as llm:
        params = sampling_params(args, llm.get_default_sampling_params(), DEFAULT_MAX_TOKENS)
        if args.chat:
            question = llm.chat_prompt([{"role": "user", "content": prompt}])
            answer = stream(llm.engine, "run", question, params, title=title)
        else:
            answer = stream(llm.engine, "run", prompt, params, echo=prompt, title=title)
        sys.stdout.write("\n")
        if args.stats:
            print(answer.line(), file=sys.stderr)
    return answer.status
