"""A conversation in the terminal: its messages, its settings, and the commands that change them."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from quire.cli.output import reason_of, say, write_json
from quire.cli.terminal.answer import Answer, Write
from quire.cli.terminal.markdown import create_display
from quire.cli.tools.calls import RunCall, has_calls, run_calls, written_call
from quire.config.json_file import parse_json, read_bounded
from quire.errors import InvalidParameter, RequestError, counted
from quire.inputs import ChatMessage
from quire.message_formats.parts import ToolCall
from quire.sampling_params import SamplingParams
from quire.utils.lazy import nearest

Answerer = Callable[[list[ChatMessage], Mapping[str, Any], Write, bool], Answer]
"""Streams the answer to a conversation, with some sampling parameters set; the last says whether it may call tools.

Raises: RequestError.
"""
COMMANDS = {
    "/help": "show this list",
    "/system [TEXT]": "set the system prompt, or remove it; the conversation goes on",
    "/set NAME VALUE": "set a sampling parameter, such as temperature 0.5; VALUE default takes the setting back",
    "/show": "show model, system prompt and settings",
    "/save FILE": "write the conversation to a JSON file",
    "/load FILE": "go on with a conversation that was saved",
    "/regenerate": "answer the last question again",
    "/clear": "forget the conversation, keep system prompt and settings",
    "/stats": "show numbers after each answer, or stop it",
    "/quit": "leave, as does Ctrl-D",
}
MAX_SAVED_BYTES = 16 << 20
"""Of a file that is loaded: as much as a server takes in a body."""
MAX_ROUNDS = 4
"""Of calls for one question; then the model has to answer."""
NOT_SHOWN = (
    "n",
    "best_of",
    "use_beam_search",
    "beam_width",
    "length_penalty",
    "early_stopping",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "output_kind",
)
"""Sampling parameters that a chat does not take: it shows the text of one answer as it comes."""
KEYS = "Enter sends, Alt-Enter starts a new line, Ctrl-C clears the line or stops an answer, Ctrl-D leaves."
ALIASES = {"/new": "/clear", "/exit": "/quit", "/bye": "/quit", "/?": "/help", "/retry": "/regenerate"}


class Conversation:
    """The messages so far, and how they are answered."""

    def __init__(
        self,
        answer: Answerer,
        *,
        model: str,
        system_prompt: str | None,
        show_stats: bool,
        plain: bool,
        run_call: RunCall | None = None,
    ) -> None:
        """`run_call` runs the calls of the model's tools; None where none are offered."""
        self._answer = answer
        self._run_call = run_call
        self._model = model
        self._plain = plain
        self.system_prompt = system_prompt
        self.show_stats = show_stats
        self.settings: dict[str, Any] = {}
        self.turns: list[ChatMessage] = []
        """Questions, answers, calls and their results, without the system prompt."""

    def obey(self, line: str) -> bool:
        """A command or a question; False when it ends the conversation."""
        line = line.strip()
        if not line.startswith("/") or "\n" in line:
            if line:
                self.ask(line)
            return True
        name, _, rest = line.partition(" ")
        name = ALIASES.get(name, name)
        if name == "/quit":
            return False
        act = getattr(self, f"_do_{name[1:]}", None) if f"{name} ".startswith(tuple(_words())) else None
        if act is None:
            say(f"{name} is no command{nearest(name, [word.strip() for word in _words()])} (/help lists them)")
        else:
            act(rest.strip())
        return True

    def ask(self, question: str) -> int:
        """Stream the answer and remember both; its exit status, 1 when the request was refused or failed."""
        return self._ask([*self.turns, {"role": "user", "content": question}])

    def _ask(self, turns: list[ChatMessage]) -> int:
        system: list[ChatMessage] = (
            [{"role": "system", "content": self.system_prompt}] if self.system_prompt is not None else []
        )
        for num_rounds in range(MAX_ROUNDS + 1):
            may_call = num_rounds < MAX_ROUNDS
            try:
                answer = self._shown([*system, *turns], may_call=may_call)
            except RequestError as error:
                say(f"quire: {error} (/clear starts over)")
                return 1
            if self.show_stats:
                say(answer.line())
            if self._run_call is None or not has_calls(answer):
                break
            if not may_call:
                say(f"quire: stopped after {MAX_ROUNDS} rounds of calls")
                break
            turns = [*turns, *run_calls(answer, self._run_call)]
        self.turns = [*turns, {"role": "assistant", "content": answer.text}]
        return answer.status

    def _shown(self, messages: list[ChatMessage], *, may_call: bool) -> Answer:
        """The answer, once it was shown; a display is opened with the first piece, so that a refusal shows nothing."""
        display = create_display(plain=self._plain)
        is_open = False

        def write(text: str) -> None:
            nonlocal is_open
            if text and not is_open:
                display.__enter__()
                is_open = True
            if is_open:
                display.write(text)

        try:
            answer = self._answer(messages, self.settings, write, may_call)
        finally:
            if is_open:
                display.__exit__(None, None, None)
        if not is_open and not has_calls(answer):
            print(flush=True)
        return answer

    def _do_help(self, _: str) -> None:
        for name, text in COMMANDS.items():
            say(f"  {name:<18} {text}")
        say(KEYS)

    def _do_system(self, text: str) -> None:
        self.system_prompt = text or None
        say("the system prompt is set" if text else "there is no system prompt now")

    def _do_set(self, words: str) -> None:
        name, _, text = words.removeprefix("parameter ").strip().partition(" ")
        if not name or not text:
            say("say what to set: /set temperature 0.5")
            return
        if text.strip() == "default":
            self.settings.pop(name, None)
            say(f"{name} is the default")
            return
        try:
            value = parse_json(text)
        except ValueError:
            value = text.strip()
        try:
            _check_settings({name: value})
        except RequestError as error:
            say(f"quire: {error}")
            return
        self.settings[name] = value
        say(f"{name} = {json.dumps(value)}")

    def _do_show(self, _: str) -> None:
        say(f"model: {self._model}")
        say(f"system prompt: {self.system_prompt or 'none'}")
        say(f"settings: {', '.join(f'{name} = {value}' for name, value in self.settings.items()) or 'the defaults'}")
        say(f"messages: {len(self.turns)}")

    def _do_save(self, name: str) -> None:
        saved = {
            "model": self._model,
            "system": self.system_prompt,
            "settings": self.settings,
            "messages": self.turns,
        }
        try:
            write_json(_file(name), saved)
            say(f"{counted(len(self.turns), 'message')} written to {name}")
        except (OSError, ValueError) as error:
            say(f"{name or 'no file given'}: {reason_of(error)}")

    def _do_load(self, name: str) -> None:
        try:
            data = read_bounded(_file(name), MAX_SAVED_BYTES)
            if data is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        except (OSError, ValueError) as error:
            say(f"{name or 'no file given'}: {reason_of(error)}")
            return
        try:
            saved = parse_json(data)
            turns = [_message(turn) for turn in saved["messages"]]
            system, settings = saved.get("system"), dict(saved.get("settings") or {})
            _check_settings(settings)
        except (ValueError, LookupError, TypeError, AttributeError, RequestError):
            say(f"{name} holds no conversation that /save wrote; nothing was changed")
        else:
            self.turns, self.system_prompt, self.settings = turns, system, settings
            say(f"{counted(len(turns), 'message')} read from {name}")

    def _do_regenerate(self, _: str) -> None:
        questions = [index for index, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not questions:
            say("there is no question to answer again")
            return
        self._ask(self.turns[: questions[-1] + 1])

    def _do_clear(self, _: str) -> None:
        self.turns = []
        say("the conversation is empty")

    def _do_stats(self, _: str) -> None:
        self.show_stats = not self.show_stats
        say(f"numbers are {'shown' if self.show_stats else 'not shown'} after each answer")


def _file(name: str) -> Path:
    """Raises: OSError for the home of a user that there is not."""
    try:
        return Path(name or ".").expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises: RequestError for what is no sampling parameter, and for those that a chat cannot have."""
    for name in settings:
        if name in NOT_SHOWN:
            raise InvalidParameter(
                f"{name} has no place in a chat, which shows the text of one answer as it comes", parameter=name
            )
    SamplingParams.from_optional(**settings)


def _message(turn: Mapping[str, Any]) -> ChatMessage:
    """A message of a file. Raises: LookupError, TypeError, ValueError when it is none."""
    message: dict[str, Any] = {"role": str(turn["role"]), "content": str(turn["content"])}
    if "tool_calls" in turn:
        message["tool_calls"] = [_call(call) for call in turn["tool_calls"]]
    if "tool_call_id" in turn:
        message["tool_call_id"] = str(turn["tool_call_id"])
    return cast(ChatMessage, message)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return written_call(ToolCall(str(call["id"]), str(function["name"]), str(function["arguments"])))


def _words() -> list[str]:
    """Every command as a word, with the space that ends it."""
    return [f"{name.partition(' ')[0]} " for name in COMMANDS]
