"""`MessageFormat`: how a family of models writes thinking and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, runtime_checkable

from quire.message_formats.grammars.call_grammar import CallGrammar
from quire.message_formats.marks import Marks
from quire.message_formats.reader import Reader, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.writer import CallWriter, MessageWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The markers around thinking."""

    begin: str
    end: str
    others: tuple[tuple[str, str], ...] = ()
    """Other pairs of markers. Those that the prompt has begun, or ended, count in its answer."""
    is_implied: bool = False
    """Every message begins inside the thinking, whether its prompt says so or not."""
    ends_before: tuple[str, ...] = ()
    """What also ends it, and is not part of it."""
    heading: str = ""
    """Stands behind `begin` and is not part of it."""
    answer: tuple[str, str] | None = None
    """Markers around the text behind it, which are not part of the text."""
    closing: tuple[str, ...] = ()
    """Markers that end parts of the message, and are not part of the text."""
    is_shown: bool = False
    """It is told as part of the text, with its markers."""
    layout: Layout | None = None
    """Reads the whole message instead."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        layout = () if self.layout is None else self.layout.markers
        pairs = ((self.begin, self.end), *self.others)
        return (*chain(*pairs), *self.ends_before, *(self.answer or ()), *self.closing, *layout)


@dataclass(frozen=True, slots=True)
class Source:
    """What a call is read from, and what is known about it."""

    reader: Reader
    marks: Marks
    tools: Mapping[str, Tool]
    is_kept: bool = False
    """A grammar keeps calls well-formed, so nothing in them has to be guessed."""


class CallSyntax(Protocol):
    """How calls are written. An instance is a row of data; there are few classes of them."""

    @property
    def begins(self) -> tuple[str, ...]:
        """Markers with which calls begin."""

    @property
    def bare(self) -> str:
        """Characters with which a message begins that is a call without a marker."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, those of `begins` included."""

    def read(self, source: Source, begin: str, calls: CallWriter) -> Steps[None]:
        """Read the calls behind a marker of `begins`, or from the first character of a message (begin is empty).

        Raises: Malformed.
        """

    def openings(self, names: Iterable[str]) -> tuple[str, ...]:
        """With what a message begins that is a call of one of these tools without a marker, white space before it and
        behind its first character aside. Empty where that cannot be told from text."""

    @property
    def has_other_openings(self) -> bool:
        """Whether a message that begins otherwise than `openings` say may be a call without a marker, too."""

    def rest(self, grammar: CallGrammar, begin: str) -> str:
        """What follows a marker of `begins` (empty: in a message that is a call without marker), as an expression of
        the grammar: one call of any of its tools, or as many as the markers hold where the grammar has `parallel`, up
        to and with the last closing marker. Adds rules.
        """

    def several(self, grammar: CallGrammar) -> str:
        """A message that consists of one call, or more where the grammar has `parallel`, the first opening marker
        included, as an expression."""


@runtime_checkable
class Layout(Protocol):
    """How whole messages are written that are not thinking, then text and calls in turn."""

    @property
    def answer(self) -> str:
        """What stands before the answer. The form of an answer counts from there on."""

    @property
    def call_end(self) -> str:
        """What ends a call."""

    @property
    def frame(self) -> tuple[str, ...]:
        """Markers that are tokens where a grammar takes headers."""

    @property
    def takes_headers(self) -> bool:
        """A grammar of calls takes the headers of all messages. Otherwise it counts behind the markers of calls."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""

    def read_message(self, source: Source, message: MessageWriter, *, in_thinking: bool) -> Steps[None]:
        """Read a message to its end; `in_thinking`: the prompt has begun the thinking."""

    def ends_in_thinking(self, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool:
        """Whether a prompt ends inside the thinking."""

    def ends_in_header(self, marks: Marks, prompt_token_ids: Sequence[int], prompt_text: str) -> bool | None:
        """Whether a prompt ends where a message's header is to follow. False: inside the thinking; None: elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """How messages are written: thinking, then text and calls in turn, or as `layout` has it."""

    thinking: Thinking | None = None
    calls: CallSyntax | None = None

    @property
    def layout(self) -> Layout | None:
        """What reads whole messages, where thinking or calls are part of such a layout."""
        calls: object = self.calls
        if isinstance(calls, Layout):
            return calls
        return None if self.thinking is None else self.thinking.layout

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        thinking = () if self.thinking is None else self.thinking.markers
        return thinking if self.calls is None else (*thinking, *self.calls.markers)
