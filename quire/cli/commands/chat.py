"""`quire chat`: a conversation in the terminal; the model is in this process, or served (`--url`)."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.cli.output import say
from quire.cli.sampling_flags import add_sampling_flags, add_server_flags, sampling_params
from quire.cli.terminal.answer import Answer, Write, stream
from quire.cli.tools.demo import TOOLS, run_tool
from quire.config.flags.args import EngineArgs, add_flags, from_namespace
from quire.errors import ConfigError, shown
from quire.inputs import ChatMessage
from quire.log import set_default_level

if TYPE_CHECKING:
    from quire.cli.terminal.conversation import Answerer
    from quire.llm import LLM

HINT = "/help lists the commands, Ctrl-D leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    add_display_flags(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask one question and leave")
    parser.add_argument(
        "--tools", metavar="NAME", help="offer tools to the model and run what it calls; demo: a calculator and a clock"
    )
    parser.add_argument("--stats", action="store_true", help="say how many tokens and how fast after each answer")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the start-up log")
    add_server_flags(parser)
    add_sampling_flags(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def add_display_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that `run` takes, too, for the chat that it opens."""
    parser.add_argument("--system-prompt", metavar="TEXT", help="instructions that come before a conversation")
    parser.add_argument("--plain", action="store_true", help="print answers of a chat as they are, not as Markdown")
    parser.add_argument("--no-history", action="store_true", help="do not keep the questions for the next chat")


def run(args: argparse.Namespace) -> int:
    """Read questions, stream answers.

    Raises: QuireError when the engine cannot start.
    """
    if not args.verbose:
        set_default_level("WARNING")
    _check_tools(args.tools)
    if args.url is not None:
        return _converse(args, *_served(args))
    if args.api_key is not None:
        raise ConfigError("--api-key has no effect without --url")
    return run_in_process(args)


def run_in_process(args: argparse.Namespace) -> int:
    """The chat with a model that this process loads.

    Raises: QuireError when the engine cannot start, or the model has no chat template.
    """
    from quire.llm import LLM

    with LLM.from_engine_args(from_namespace(args)) as llm:
        # A model without a template, or with one that shows no tools, is refused now.
        llm.chat_prompt([{"role": "user", "content": "Hello"}], tools=_tools(args))
        return _converse(args, llm.engine.config.model_config.model, _in_process(args, llm))


def _converse(args: argparse.Namespace, model: str, answer: Answerer) -> int:
    from quire.cli.terminal.conversation import COMMANDS, Conversation
    from quire.cli.terminal.reader import create_reader

    conversation = Conversation(
        answer,
        model=model,
        system_prompt=args.system_prompt,
        show_stats=args.stats,
        plain=args.plain,
        run_call=run_tool if _tools(args) else None,
    )
    if vars(args).get("quick") is not None:
        return conversation.ask(args.quick)
    if sys.stdin.isatty():
        say(f"model: {model}; {HINT}")
    words = [name.partition(" ")[0] for name in COMMANDS]
    read = create_reader(words, keep_history=not args.no_history)
    while (line := read()) is not None:
        if not conversation.obey(line):
            break
    return 0


def _in_process(args: argparse.Namespace, llm: LLM) -> Answerer:
    params = sampling_params(args, llm.engine.config.model_config.generation_defaults, None)
    tools = _tools(args)
    ordinals = itertools.count()
    if tools is not None:
        from quire.cli.tools.in_process import Calls

        calls = Calls(llm, tools)

    def answer(messages: list[ChatMessage], settings: Mapping[str, Any], write: Write, may_call: bool) -> Answer:
        request_id = f"chat-{next(ordinals)}"
        prompt, wanted = llm.chat_prompt(messages, tools=tools), params.clone(**settings)
        if tools is None or not may_call:
            return stream(llm.engine, request_id, prompt, wanted, write=write)
        found = calls.prepare(request_id, prompt, wanted)
        return stream(llm.engine, request_id, prompt, found.params, write=write, read=found.read)

    return answer


def _tools(args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """What is offered to the model; `quire run` offers nothing."""
    return None if vars(args).get("tools") is None else [tool.definition() for tool in TOOLS.values()]


def _check_tools(name: str | None) -> None:
    """Raises: ConfigError for tools that do not exist."""
    if name not in (None, "demo"):
        raise ConfigError(f"--tools {shown(name)}: there is only demo, which has {' and '.join(TOOLS)}")


def _served(args: argparse.Namespace) -> tuple[str, Answerer]:
    """(model, what answers).

    Raises: ConfigError for flags that are for the server to be given.
    """
    from quire.cli.client.served import Served

    for option in dataclasses.fields(EngineArgs):
        if option.name in vars(args) and option.name != "model":
            flag = option.name.replace("_", "-")
            raise ConfigError(f"--{flag} has no effect with --url; give it to `quire serve`")
    served = Served(args, vars(args).get("model"), _tools(args) or ())
    return served.model, served.chat
