"""`quire chat`: a conversation in the terminal; the model is in this process, or served (`--url`)."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.cli.sampling_flags import add_sampling_flags, add_server_flags, sampling_params
from quire.cli.terminal import Answer, read_line, stream
from quire.config.args import EngineArgs, add_flags, from_namespace
from quire.errors import ConfigError, RequestError
from quire.inputs import ChatMessage
from quire.log import set_default_level

if TYPE_CHECKING:
    from quire.llm import LLM

Answerer = Callable[[list[ChatMessage]], Answer]
"""Streams the answer to a conversation.

Raises: RequestError.
"""
DEFAULT_MAX_TOKENS = 512
HELP = "/new starts over, /stats shows numbers, /exit or Ctrl-D ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    add_display_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask one question and leave")
    parser.add_argument("--stats", action="store_true", help="say how many tokens and how fast after each answer")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the start-up log")
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def add_display_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `run` takes, too, for the chat that it opens."""
    parser.add_argument("--system-prompt", metavar="TEXT", help="instructions that come before a conversation")


def run(args: argparse.Namespace) -> int:
    """Read questions, stream answers.

    Raises: QuireError when the engine cannot start.
    """
    if not args.verbose:
        set_default_level("WARNING")
    if args.url is not None:
        return _converse(args, *_served(args))
    if args.api_key is not None:
        raise ConfigError("--api-key has no effect without --url")
    return run_in_process(args)


def run_in_process(args: argparse.Namespace) -> int:
    """The chat with a model that this process loads.

    Raises: QuireError when the engine cannot start.
    """
    from quire.llm import LLM

    with LLM.from_engine_args(from_namespace(args)) as llm:
        return _converse(args, llm.engine.config.model_config.model, _in_process(args, llm))


def _converse(args: argparse.Namespace, model: str, answer: Answerer) -> int:
    conversation = Conversation(answer, args)
    if vars(args).get("quick") is not None:
        return conversation.ask(args.quick)
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{model}: {HELP}", file=sys.stderr)
    while (line := read_line(interactive)) is not None:
        if line.strip() in ("/exit", "/quit"):
            break
        conversation.obey(line.strip())
    return 0


def _in_process(args: argparse.Namespace, llm: LLM) -> Answerer:
    params = sampling_params(args, llm.get_default_sampling_params(), DEFAULT_MAX_TOKENS)
    ordinals = itertools.count()

    def answer(messages: list[ChatMessage]) -> Answer:
        return stream(llm.engine, f"chat-{next(ordinals)}", llm.chat_prompt(messages), params)

    return answer


def _served(args: argparse.Namespace) -> tuple[str, Answerer]:
    """(model, what answers).

    Raises: ConfigError for flags that are for the server to be given.
    """
    from quire.cli.served import Served

    for option in dataclasses.fields(EngineArgs):
        if option.name in vars(args) and option.name != "model":
            flag = option.name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect with --url; give it to `quire serve`")
    if args.max_tokens is None:
        args.max_tokens = DEFAULT_MAX_TOKENS
    served = Served(args, vars(args).get("model"))
    return served.model, served.chat


class Conversation:
    """The messages so far."""

    def __init__(self, answer: Answerer, args: argparse.Namespace) -> None:
        self.answer = answer
        self.args = args
        self.show_stats = args.stats
        self.start_over()

    def start_over(self) -> None:
        """Forget everything but the system prompt."""
        system = self.args.system_prompt
        self.messages: list[ChatMessage] = [{"role": "system", "content": system}] if system else []

    def obey(self, line: str) -> None:
        """A command or a question."""
        if line == "/new":
            self.start_over()
        elif line == "/stats":
            self.show_stats = not self.show_stats
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            self.ask(line)

    def ask(self, question: str) -> int:
        """Stream the answer and remember both; its exit status, 1 when the request was refused or failed."""
        self.messages.append({"role": "user", "content": question})
        try:
            answer = self.answer(self.messages)
        except RequestError as error:
            self.messages.pop()
            print(f"quire: {error} (/new starts over)", file=sys.stderr)
            return 1
        print()
        self.messages.append({"role": "assistant", "content": answer.text})
        if self.show_stats:
            print(answer.line(), file=sys.stderr)
        return answer.status
