"""`Blocks`: outputs of several messages, each a header, a marker, a body and an end marker.

Inkling: `<|message_model|>NAME<|content_invoke_tool_json|>{...}<|end_message|>`. The marker says what the body is.
Muse: `<|start|>assistant to=NAME<|message|>...<|eom|>`. The recipient says it.

The prompt has begun the first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from re import compile as pattern

from quire.message_formats.calls.json_calls import JsonCalls
from quire.message_formats.calls.tagged import TaggedCalls
from quire.message_formats.format import Source
from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.harmony import Bodies
from quire.message_formats.marks import Marks
from quire.message_formats.reader import Malformed, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.writer import MessageWriter, Trimmed

RECIPIENT = "to="
_WORD = pattern(r"[\w.:/$@+-]*")


class Kind(StrEnum):
    """What a body is."""

    THINKING = "thinking"
    TEXT = "text"
    CALLS = "calls"
    HIDDEN = "hidden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Reads such outputs: a syntax of calls, and the layout of the thinking."""

    start: str
    """Begins a message."""
    role: str = ""
    """Stands behind `start`."""
    bodies: Mapping[str, Kind]
    """Markers between a header and its body, and what the body is."""
    recipients: Mapping[str, Kind] = field(default_factory=dict)
    """What bodies are for recipients that are no tools. Empty: headers have none."""
    ends: tuple[str, ...]
    """What ends a body; the first one where others may follow."""
    calls: JsonCalls | TaggedCalls
    """How the calls of a body are written."""
    answer: str
    """See `Layout`."""

    bare = ""
    has_other_openings = False

    @property
    def has_recipients(self) -> bool:
        """Headers say what bodies are."""
        return bool(self.recipients)

    @property
    def takes_headers(self) -> bool:
        """See `Layout`."""
        return self.has_recipients

    @property
    def begins(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return (self.start,) if self.has_recipients else self.calls.begins

    @property
    def call_end(self) -> str:
        """See `Layout`. None of the markers ends an output only behind a call."""
        return self.ends[-1]

    @property
    def frame(self) -> tuple[str, ...]:
        """See `Layout`."""
        return (self.start, *self.bodies, *self.ends)

    @property
    def markers(self) -> tuple[str, ...]:
        """See `CallSyntax`."""
        return tuple(dict.fromkeys((*self.frame, *self.calls.markers)))

    def read(self, source: Source, begin: str, calls: object) -> Steps[None]:
        """See `CallSyntax`. No text of another layout holds such calls."""
        yield from source.reader.peek()
        raise Malformed

    def read_message(self, source: Source, message: MessageWriter, *, in_thinking: bool) -> Steps[None]:
        """See `Layout`."""
        yield from _Output(self, source, message).read(in_thinking=in_thinking)

    def ends_in_thinking(self, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool:
        """See `Layout`."""
        marker, header = self._last(marks, prompt_token_ids, prompt_text)
        return marker in self.bodies and self.kind(header, marker) is Kind.THINKING

    def ends_in_header(self, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool | None:
        """See `Layout`."""
        marker, header = self._last(marks, prompt_token_ids, prompt_text)
        if not self.has_recipients or self.ends_in_thinking(marks, prompt_token_ids, prompt_text):
            return False
        return True if marker == self.start and header in ("", self.role) else None

    def _last(self, marks: Marks, token_ids: Sequence[int], text: str) -> tuple[str, str]:
        """The last marker of a prompt that is a token, and the header that it is in or ends."""
        ids = {marks.ids[marker]: marker for marker in self.frame if marker in marks.ids}
        marker = next((ids[token_id] for token_id in reversed(token_ids) if token_id in ids), "")
        header = text.rpartition(self.start)[2]
        return marker, (header.partition(marker)[0] if marker in self.bodies else header).strip()

    def kind(self, header: str, marker: str) -> Kind:
        """What the body behind a header and a marker is."""
        if not self.has_recipients:
            return self.bodies[marker]
        name = header.removeprefix(self.role).strip().removeprefix(RECIPIENT)
        return self.recipients.get(name, Kind.CALLS)

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """See `CallSyntax`. No message is a call without a marker."""
        return ()

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """See `CallSyntax`. Behind a recipient's header its calls; the bodies of other messages are free."""
        if not self.has_recipients:
            return self.calls.rest(grammar, begin)
        role = grammar.literal(self.role)
        call = grammar.one_of(lambda tool: self._call(grammar, tool))
        names = " | ".join(grammar.literal(f" {RECIPIENT}{name}") for name in self.recipients if name)
        message = grammar.marker(next(iter(self.bodies)))
        return f"({role})? {call} | ({role})? ({names})? {message}"

    def several(self, grammar: CallGrammar) -> str:
        """See `CallSyntax`. Thinking may come before the calls."""
        start = grammar.sequence(grammar.marker(self.start), grammar.literal(self.role))
        call = grammar.one_of(lambda tool: self._call(grammar, tool))
        if not self.has_recipients or grammar.has_thought:
            return grammar.sequence(f"({start})?", grammar.repeated(call, start))
        return grammar.sequence(self._thinking(grammar, start), grammar.repeated(call, start))

    def _thinking(self, grammar: CallGrammar, start: str) -> str:
        """Thinking that the output may begin with, where its marker is no token."""
        if grammar.max_thinking == 0 or not grammar.is_token(self.ends[0]):
            return ""
        name = next(name for name, kind in self.recipients.items() if kind is Kind.THINKING and name)
        limit = "" if grammar.max_thinking is None else f"[max_tokens={grammar.max_thinking}]"
        text = grammar.rule(grammar.terminal("(?s:.*)"), limit)
        head = f"{grammar.literal(f' {RECIPIENT}{name}')} {grammar.marker(next(iter(self.bodies)))}"
        return f"({head} {text} {grammar.marker(self.ends[0])} {start})?"

    def _call(self, grammar: CallGrammar, tool: Tool) -> str:
        """The message that calls a tool, from its header's name on."""
        end = grammar.marker(self.ends[0])
        if isinstance(self.calls, JsonCalls):
            (begin,) = self.calls.begins
            head = f"({grammar.literal(tool.name)})?"
            return grammar.sequence(head, grammar.marker(begin), self.calls.call(grammar, tool), end)
        head = f"{grammar.literal(f' {RECIPIENT}{tool.name}')} {grammar.marker(next(iter(self.bodies)))}"
        last = f"({end} | {grammar.marker(self.ends[-1])})" if grammar.parallel else grammar.marker(self.ends[-1])
        return grammar.sequence(head, self.calls.call(grammar, tool), last)


class _Output:
    """The messages of one output."""

    def __init__(self, blocks: Blocks, source: Source, message: MessageWriter) -> None:
        self._blocks = blocks
        self._source = source
        self._reader = source.reader
        self._message = message
        self._text = Bodies(message.text)
        self._reasoning = Bodies(message.reasoning)
        marks = source.marks
        self._start = marks(blocks.start)
        self._bodies = {marks(marker): marker for marker in blocks.bodies}
        self._ends = tuple(map(marks, blocks.ends))

    def read(self, *, in_thinking: bool) -> Steps[None]:
        """Read all of them."""
        if in_thinking:
            yield from self._body(Kind.THINKING)
        else:
            yield from self._first()
        while (yield from self._find_start()):
            yield from self._one()

    def _first(self) -> Steps[None]:
        """The message that the prompt has begun: with its header, or all of it but the body."""
        self._reader.keep()
        header = yield from self._header(role="")
        if header is not None:
            yield from self._rest(*header)
            return
        read = "" if self._reader.is_cut_here else self._reader.kept()
        self._reader.unread(read)
        self._reader.forget()
        spaces = yield from self._reader.spaces()
        self._text.put(spaces if (yield from self._reader.peek()) else "")
        yield from self._body(Kind.TEXT, goes_on=True)

    def _find_start(self) -> Steps[bool]:
        """Whether another message follows. What stands before it is text."""
        between = Trimmed(self._text.put, after_marker=True)
        self._text.begin()
        while (marker := (yield from self._reader.until((self._start, *self._ends), between.put))) in self._ends:
            between.marker()
        between.end()
        if marker is not None:
            self._reader.unread(marker)
        return marker is not None

    def _one(self) -> Steps[None]:
        """A message, from what begins it on."""
        self._reader.keep()
        self._reader.skip(len(self._start))
        header = yield from self._header(role=self._blocks.role)
        if header is None:
            self._text.begin()
            self._text.put("" if self._reader.is_cut_here else self._reader.kept())
            self._reader.forget()
        else:
            yield from self._rest(*header)

    def _header(self, *, role: str) -> Steps[tuple[str, str] | None]:
        """A header, and the marker behind it. None: there is no such thing, or the output ends before it."""
        reader = self._reader
        yield from reader.spaces()
        if role and not (yield from reader.accept(role)):
            return None
        yield from reader.spaces()
        if self._blocks.has_recipients and (yield from reader.accept(RECIPIENT)):
            name = yield from reader.matching(_WORD)
            if not name:
                return None
        else:
            name = "" if self._blocks.has_recipients else (yield from reader.matching(_WORD))
        yield from reader.spaces()
        for marker, spelled in self._bodies.items():
            if (yield from reader.accept(marker)):
                return name, spelled
        return None

    def _rest(self, name: str, marker: str) -> Steps[None]:
        """The body of a message whose header was read and kept."""
        kind = self._blocks.kind(name, marker)
        goes_on = kind is Kind.CALLS and not (yield from self._calls(marker))
        self._reader.forget()
        yield from self._body(Kind.TEXT if kind is Kind.CALLS else kind, goes_on=goes_on)

    def _calls(self, marker: str) -> Steps[bool]:
        """The calls of a body. False: it turns out to be text, which is told as far as it was read."""
        calls = self._message.calls
        try:
            if calls is None:
                raise Malformed
            if self._blocks.has_recipients:
                (marker,) = self._blocks.calls.begins
                yield from self._reader.spaces()
                yield from self._reader.expect(self._source.marks(marker))
            yield from self._blocks.calls.read(self._source, marker, calls)
            yield from self._reader.spaces()
        except Malformed:
            is_told = calls is not None and calls.cut() and self._reader.is_closed
            self._text.begin()
            self._text.put("" if is_told or self._reader.is_cut_here else self._reader.kept())
            return False
        return True

    def _body(self, kind: Kind, *, goes_on: bool = False) -> Steps[None]:
        """A body, up to and with what ends it; or what begins the next message. `goes_on`: it has begun."""
        bodies = {Kind.THINKING: self._reasoning, Kind.TEXT: self._text}.get(kind)
        if bodies is not None and not goes_on:
            bodies.begin()
        self._message.is_thinking = kind is Kind.THINKING
        put = _ignore if bodies is None else bodies.put
        if (yield from self._reader.until((self._start, *self._ends), put)) == self._start:
            self._reader.unread(self._start)
        self._message.is_thinking = False


def _ignore(_: str) -> None:
    """Nobody is to see it."""
