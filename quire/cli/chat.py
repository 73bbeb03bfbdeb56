"""`quire chat`: a conversation in the terminal, the model in this process."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from quire.cli.sampling_flags import add_sampling_flags, sampling_params
from quire.cli.terminal import read_text, stream
from quire.config.args import add_flags, from_namespace
from quire.errors import RequestError
from quire.inputs import ChatMessage
from quire.log import set_default_level

if TYPE_CHECKING:
    from quire.llm import LLM

DEFAULT_MAX_TOKENS = 512
HELP = "/new starts over, /stats shows numbers, /exit or Ctrl-D ends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this subcommand."""
    parser.add_argument("--system-prompt", metavar="TEXT", help="instructions that come before the conversation")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask one question and leave")
    parser.add_argument("--stats", action="store_true", help="say how many tokens and how fast after each answer")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the start-up log")
    add_sampling_flags(parser)
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read questions, stream answers.

    Raises: QuireError when the engine cannot start.
    """
    if not args.verbose:
        set_default_level("WARNING")
    from quire.llm import LLM

    with LLM.from_engine_args(from_namespace(args)) as llm:
        conversation = Conversation(llm, args)
        if args.quick is not None:
            return 0 if conversation.ask(args.quick) else 1
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{llm.engine.config.model_config.model}: {HELP}", file=sys.stderr)
        while (line := _read_line(interactive)) is not None:
            if line.strip() in ("/exit", "/quit"):
                break
            conversation.obey(line.strip())
    return 0


def _read_line(interactive: bool) -> str | None:
    if interactive:
        sys.stderr.write("> ")
        sys.stderr.flush()
    try:
        line = read_text(sys.stdin.readline)
    except KeyboardInterrupt:
        return None
    return line or None


class Conversation:
    """The messages so far."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm = llm
        self.args = args
        self.params = sampling_params(args, llm.get_default_sampling_params(), DEFAULT_MAX_TOKENS)
        self.show_stats = args.stats
        self.num_asked = 0
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

    def ask(self, question: str) -> bool:
        """Stream the answer and remember both; False when the request was refused or failed."""
        self.messages.append({"role": "user", "content": question})
        self.num_asked += 1
        try:
            prompt = self.llm.chat_prompt(self.messages)
            answer = stream(self.llm.engine, f"chat-{self.num_asked}", prompt, self.params)
        except RequestError as error:
            self.messages.pop()
            print(f"quire: {error} (/new starts over)", file=sys.stderr)
            return False
        print()
        self.messages.append({"role": "assistant", "content": answer.text})
        if self.show_stats:
            print(answer.line(), file=sys.stderr)
        return answer.finish_reason != "error"
