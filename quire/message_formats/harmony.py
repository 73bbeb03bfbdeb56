"""`Harmony`: the layout of gpt-oss. An output is several messages, each with a channel and perhaps a recipient.

`<|channel|>analysis<|message|>...<|end|>` is thinking; `<|channel|>final<|message|>...` and commentary without a
recipient are text; `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>` is a call. The
prompt has written the first `<|start|>assistant`. The recipient may stand before the channel, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from re import compile as pattern

from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import CallGrammar, in_regex
from quire.message_formats.marks import Marks
from quire.message_formats.reader import Malformed, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.writer import CallWriter, MessageWriter, Trimmed

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
CALL = "<|call|>"
ENDS = ("<|end|>", CALL, "<|return|>")
THINKING_CHANNEL = "analysis"
FUNCTIONS = "functions."
"""Before the names of a request's tools. Other recipients are tools that the model knows by itself."""
KNOWN = {"browser": r"browser\.[a-z_]+", "container": r"container\.[a-z_]+", "python": "python"}
"""Tools that the model knows by itself, as it writes them."""
ROLE = "assistant"
RECIPIENT = "to="
MAX_TEXT = 64
"""Characters between two markers of a header that a grammar keeps."""
MAX_WORDS = 8
"""Of a header."""
_CHANNELS = "(commentary|analysis)"
"""Of calls."""
_WORD = pattern(r"[\w.:/$@+=-]*")


@dataclass(frozen=True, slots=True)
class _Header:
    channel: str = ""
    recipient: str = ""


class Harmony:
    """Reads such messages; `openai` among the syntaxes of calls, and the layout of `openai_gptoss`."""

    begins = (START, CHANNEL)
    bare = ""
    has_other_openings = False
    takes_headers = True
    answer = f"{CHANNEL}final{MESSAGE}"
    call_end = CALL
    markers = frame = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """See `CallSyntax`. No text of another layout holds such calls."""
        yield from source.reader.expect(source.marks(MESSAGE))
        raise Malformed

    def read_message(self, source: Source, message: MessageWriter, *, in_thinking: bool) -> Steps[None]:
        """See `Layout`."""
        yield from _Messages(source, message).read(in_thinking=in_thinking)

    def ends_in_thinking(self, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool:
        """See `Layout`."""
        ids = {marks.ids[marker]: marker for marker in (START, MESSAGE, *ENDS) if marker in marks.ids}
        last = next((ids[token_id] for token_id in reversed(prompt_token_ids) if token_id in ids), "")
        return last == MESSAGE and prompt_text.rpartition(CHANNEL)[2].startswith(THINKING_CHANNEL)

    def ends_in_header(self, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool | None:
        """See `Layout`."""
        ids = {marks.ids[marker]: marker for marker in self.markers if marker in marks.ids}
        last = next((ids[token_id] for token_id in reversed(prompt_token_ids) if token_id in ids), "")
        if last == MESSAGE and self.ends_in_thinking(marks, prompt_token_ids, prompt_text):
            return False
        if last in ("", MESSAGE, *ENDS):
            return None
        written = prompt_text.rpartition(last)[2].strip()
        return True if not written or (last == START and written == ROLE) else None

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`. No message is a call without a marker."""
        return ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`. A header and, if it is that of a call, the call; the bodies of other messages are free.

        Between two markers stands one terminal: of those that may, all that match count.
        """
        channel, constrain, message, end = map(grammar.marker, (CHANNEL, CONSTRAIN, MESSAGE, CALL))
        role, kind = grammar.terminal(ROLE), grammar.terminal(f"{_CHANNELS}( json)? ?")
        as_json = f"({constrain} {grammar.terminal('json ?')})?"

        def call(tool: Tool) -> str:
            recipient = f" {RECIPIENT}{in_regex(FUNCTIONS + tool.name)}"
            first = f"{grammar.terminal(f'({ROLE})?{recipient} ?')} {channel} {kind}"
            behind = f"(({role})? {channel})? {grammar.terminal(f'{_CHANNELS}{recipient}( json)? ?')}"
            return grammar.sequence(f"({first} | {behind})", as_json, message, grammar.arguments(tool), end)

        other = grammar.rule(" | ".join(grammar.terminal(*one) for one in self._other_texts(grammar)))
        header = grammar.rule(f"({other})? ({channel} ({other})?)? ({constrain} ({other})?)? {message}")
        return f"{grammar.one_of(call)} | {header}"

    def _other_texts(self, grammar: CallGrammar) -> list[tuple[str, ...]]:
        """What stands in headers that are not those of calls: no recipient, or a tool that the model knows."""
        names = {tool.name for tool in grammar.tools}
        known = [pattern for name, pattern in KNOWN.items() if name not in names]
        return [(f"(?s:.{{1,{MAX_TEXT}}})", RECIPIENT), (f"[a-z]* ?{RECIPIENT}({'|'.join(known)})( [a-z]*)?",)]

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`. One call, since it ends the output; thinking may come before it."""
        channel, constrain, message = map(grammar.marker, (CHANNEL, CONSTRAIN, MESSAGE))
        call = grammar.one_of(
            lambda tool: grammar.sequence(
                grammar.literal(f"commentary to={FUNCTIONS}{tool.name} "),
                constrain,
                '"json"',
                message,
                grammar.arguments(tool),
            )
        )
        return grammar.sequence(self._before_call(grammar), channel, call)

    def _before_call(self, grammar: CallGrammar) -> str:
        """Thinking that the output may begin with, or what may follow thinking that the prompt has begun."""
        next_header = f'{grammar.marker(START)} "{ROLE}"'
        if grammar.has_thought:
            return f"({next_header})?"
        if grammar.max_thinking == 0 or not grammar.is_token(ENDS[0]):
            return ""
        limit = "" if grammar.max_thinking is None else f"[max_tokens={grammar.max_thinking}]"
        text = grammar.rule(grammar.terminal("(?s:.*)"), limit)
        heading = grammar.sequence(grammar.marker(CHANNEL), grammar.literal(THINKING_CHANNEL), grammar.marker(MESSAGE))
        return f"({heading} {text} {grammar.marker(ENDS[0])} {next_header})?"


class _Messages:
    """The messages of one output."""

    def __init__(self, source: Source, message: MessageWriter) -> None:
        self._source = source
        self._reader = source.reader
        self._message = message
        self._text = Bodies(message.text)
        self._reasoning = Bodies(message.reasoning)
        marks = source.marks
        self._start, self._channel, self._constrain, self._mark = map(marks, (START, CHANNEL, CONSTRAIN, MESSAGE))
        self._ends = tuple(map(marks, ENDS))

    def read(self, *, in_thinking: bool) -> Steps[None]:
        """Read all of them."""
        if in_thinking:
            yield from self._body(_Header(THINKING_CHANNEL))
        elif (yield from self._begins_with_header()):
            yield from self._one()
        else:
            yield from self._body(_Header())
        while (yield from self._find_header()):
            yield from self._one()

    def _begins_with_header(self) -> Steps[bool]:
        """Whether the output goes on with the header that the prompt has begun, or the prompt has written all of it."""
        spaces = yield from self._reader.spaces()
        for beginning in (self._channel, self._constrain, self._mark, "to="):
            if (yield from self._reader.comes(beginning)):
                return True
        self._text.put(spaces if (yield from self._reader.peek()) else "")
        return False

    def _find_header(self) -> Steps[bool]:
        """Whether another message follows. What stands before it is text."""
        between = Trimmed(self._text.put, after_marker=True)
        self._text.begin()
        while (marker := (yield from self._reader.until((self._start, self._channel, *self._ends), between.put))) in (
            self._ends
        ):
            between.marker()
        between.end()
        if marker == self._channel:
            self._reader.unread(marker)
        return marker is not None

    def _one(self) -> Steps[None]:
        """A message, its header first."""
        self._reader.keep()
        try:
            header = yield from self._header()
            if header is not None and self._is_call(header):
                yield from self._call(header)
                header = None
        except Malformed:
            header = None
            is_told = self._message.calls is not None and self._message.calls.cut() and self._reader.is_closed
            self._text.begin()
            self._text.put("" if is_told or self._reader.is_cut_here else self._reader.kept())
        self._reader.forget()
        if header is not None:
            yield from self._body(header)

    def _header(self) -> Steps[_Header | None]:
        """A header, up to and with `<|message|>`; None where the output ends before."""
        reader = self._reader
        channel = recipient = ""
        is_channel = False
        for _ in range(MAX_WORDS):
            yield from reader.spaces()
            if (yield from reader.accept(self._mark)):
                return _Header(channel, recipient)
            if (yield from reader.accept(self._channel)):
                is_channel = True
                continue
            yield from reader.accept(self._constrain)
            word = yield from reader.matching(_WORD)
            if not word:
                if (yield from reader.peek()):
                    raise Malformed
                return None
            if word.startswith(RECIPIENT):
                if recipient:
                    raise Malformed
                recipient = word.removeprefix(RECIPIENT)
            elif is_channel and not channel:
                channel = word
        raise Malformed

    def _is_call(self, header: _Header) -> bool:
        return header.recipient.startswith(FUNCTIONS) or header.recipient in self._source.tools

    def _call(self, header: _Header) -> Steps[None]:
        calls = self._message.calls
        if calls is None:
            yield from self._until_end(lambda _: None)
            raise Malformed
        calls.begin()
        calls.name(header.recipient.removeprefix(FUNCTIONS))
        is_empty = not (yield from self._reader.peek())
        yield from self._until_end(calls.arguments)
        if is_empty:
            raise Malformed  # the output ends before the arguments
        calls.end()

    def _body(self, header: _Header) -> Steps[None]:
        is_thinking = header.channel == THINKING_CHANNEL
        bodies = self._reasoning if is_thinking else self._text
        bodies.begin()
        self._message.is_thinking = is_thinking
        yield from self._until_end(bodies.put)
        self._message.is_thinking = False

    def _until_end(self, put: Callable[[str], None]) -> Steps[None]:
        if (yield from self._reader.until((self._start, *self._ends), put)) == self._start:
            self._reader.unread(self._start)


class Bodies:
    """The bodies of messages of one kind as one text: an empty line between two."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put = put
        self._separator = ""
        self._is_empty = True

    def begin(self) -> None:
        """Another one begins."""
        self._separator = "" if self._is_empty else "\n\n"

    def put(self, text: str) -> None:
        """The next piece of it."""
        if text:
            self._put(self._separator + text)
            self._is_empty, self._separator = False, ""
