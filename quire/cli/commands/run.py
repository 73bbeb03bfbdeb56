"""`quire run [MODEL] [PROMPT]`: offline generation, the quickest first contact."""

from __future__ import annotations

import argparse
import sys

from quire.cli.commands import chat
from quire.cli.model_name import answering, take_words
from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.terminal.answer import read_text, stream
from quire.config.flags.args import add_flags, from_namespace
from quire.errors import ConfigError, InvalidParameter
from quire.inputs import ChatMessage
from quire.log import set_default_level
from quire.utils.unicode import check_unicode

RAW_MAX_TOKENS = 128
"""A text that is continued has no end of its own; an answer has one."""
RULE = """\
With two words the first is the model and the second is the prompt. With one word it is the model if it is a directory
or a path, a short name (qwen3:0.6b), quire-tiny, or of the form org/name. Any other word is a prompt for the embedded
model. With --model every word is the prompt. Without a prompt, standard input is the prompt; on a terminal a model that
was named opens a chat.

A model with a chat template answers the prompt as a user's message. A model without one continues the text. --chat and
--raw choose one of the two. The embedded model has a chat template; with --raw it continues Python code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "quire run [MODEL] [PROMPT] [flags]"
    parser.description = f"{parser.description}\n\n{RULE}"
    parser.words = "words"  # type: ignore[attr-defined]
    parser.add_argument("words", nargs="*", metavar="[MODEL] [PROMPT]", help="a model, and a prompt")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--chat", action="store_true", help="answer the prompt as a user's message")
    way.add_argument("--raw", action="store_true", help="continue the prompt as it stands, without the chat template")
    parser.add_argument("--stats", action="store_true", help="say how many tokens and how fast")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the start-up log")
    chat.add_display_flags(parser)
    add_sampling_flags(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Stream one answer to standard output, or open a chat; an interrupted answer ends with 130.

    Raises: QuireError.
    """
    if not args.verbose:
        set_default_level("WARNING")
    prompt = take_words(args, args.words)
    if prompt is None and sys.stdin.isatty():
        if vars(args).get("model") is None:
            raise InvalidParameter('give a prompt: quire run "What is a KV cache?"', parameter="prompt")
        if args.raw:
            raise ConfigError("--raw continues a prompt, and none is given; without --raw a chat opens")
        return chat.run_in_process(args)
    if prompt is None:
        prompt = read_text(sys.stdin.read)
        if not prompt.strip() and args.words:
            raise InvalidParameter(
                f"{args.words[0]!r} was taken for the model, and standard input has no prompt: give one",
                parameter="prompt",
            )
    _check(prompt)
    _check_system_prompt(args, as_chat=not args.raw)
    return _answer(args, prompt)


def _answer(args: argparse.Namespace, prompt: str) -> int:
    """Answer as a chat if the model has a chat template, else continue the text; the exit status.

    Raises: QuireError.
    """
    from quire.llm import LLM

    with LLM.from_engine_args(from_namespace(args)) as llm:
        as_chat = args.chat or (llm.has_chat_template and not args.raw)
        _check_system_prompt(args, as_chat=as_chat)
        params = sampling_params(
            args, llm.engine.config.model_config.generation_defaults, None if as_chat else RAW_MAX_TOKENS
        )
        way = "answering as in a chat (--raw continues the text)" if as_chat else "continuing the text"
        title = f"{answering(args)}; {way}"
        if as_chat:
            question = llm.chat_prompt(_messages(args.system_prompt, prompt))
            answer = stream(llm.engine, "run", question, params, title=title)
        else:
            answer = stream(llm.engine, "run", prompt, params, echo=prompt, title=title)
        sys.stdout.write("\n")
        if args.stats:
            print(answer.line(), file=sys.stderr)
    return answer.status


def _check(prompt: str) -> None:
    """Refuse what is no text, in the words of a prompt rather than of a message.

    Raises: InvalidParameter.
    """
    check_unicode(prompt, "prompt")
    if not prompt.strip():
        raise InvalidParameter("the prompt is empty: give a text to answer or to continue", parameter="prompt")


def _check_system_prompt(args: argparse.Namespace, *, as_chat: bool) -> None:
    """Refuse a system prompt where there is no chat.

    Raises: ConfigError.
    """
    if args.system_prompt is not None and not as_chat:
        raise ConfigError("--system-prompt needs a chat, and here the text of the prompt is continued")


def _messages(system_prompt: str | None, prompt: str) -> list[ChatMessage]:
    system: list[ChatMessage] = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": prompt}]
