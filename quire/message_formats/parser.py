"""`MessageParser`: the one machine that reads messages of every format, however their text is cut.

What begins like a call and is none stays text. Reading is linear: nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.message_formats.format import MessageFormat, Source
from quire.message_formats.marks import Marks
from quire.message_formats.parts import Part, joined
from quire.message_formats.reader import Malformed, Reader, Steps
from quire.message_formats.tools import Tool
from quire.message_formats.writer import CallWriter, MessageWriter, Trimmed


class MessageParser:
    """Reads one message."""

    def __init__(
        self,
        message_format: MessageFormat,
        marks: Marks,
        *,
        tools: Mapping[str, Tool],
        new_id: Callable[[int], str],
        in_thinking: bool = False,
        calls_as_they_come: bool = False,
        must_call: bool = False,
    ) -> None:
        """`new_id` makes the id of a call from its number; `in_thinking`: the prompt has begun the thinking;
        `must_call`: behind the thinking a grammar allows nothing but calls."""
        self._must_call = must_call
        self._is_kept = calls_as_they_come
        self._is_in_calls = False
        self._format = message_format
        self._marks = marks
        self._parts: list[Part] = []
        self._reader = Reader()
        self._source = Source(self._reader, marks, tools, is_kept=calls_as_they_come)
        self._calls = CallWriter(
            self._parts.append, marks, new_id, on_told=self._reader.keep, as_they_come=calls_as_they_come
        )
        self._writer = MessageWriter(self._parts.append, marks, None if message_format.calls is None else self._calls)
        self._text = Trimmed(self._writer.text, after_marker=in_thinking)
        self._answer_end: tuple[str, ...] = ()
        thinking = message_format.thinking
        self._ends = () if thinking is None else tuple(map(marks, thinking.closing))
        self._steps = self._message(in_thinking=in_thinking)
        next(self._steps, None)

    @property
    def is_thinking(self) -> bool:
        """What was read so far ends inside the thinking."""
        return self._writer.is_thinking

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return self._calls.num_calls

    @property
    def is_last_call_cut(self) -> bool:
        """Whether the last call ends before its arguments do."""
        return self._calls.is_last_cut

    def feed(self, text: str) -> list[Part]:
        """Read more marked text: what is certain now."""
        self._reader.feed(text)
        next(self._steps, None)
        return self._news()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """The message has ended: the rest. `is_cut`: the model was not done.

        What a cut leaves of a marker or of a call's head is no text behind a call, nor where a grammar writes calls.
        """
        has_calls = self._calls.num_calls > 0 or self._must_call or (self._is_kept and self._is_in_calls)
        self._reader.is_cut = is_cut and has_calls
        self._reader.is_closed = True
        next(self._steps, None)
        self._text.end()
        return self._news()

    def _news(self) -> list[Part]:
        news = joined(self._parts)
        self._parts.clear()
        return news

    def _message(self, *, in_thinking: bool) -> Steps[None]:
        """The message, to its end."""
        if self._format.layout is None:
            yield from self._turns(in_thinking=in_thinking)
        else:
            yield from self._format.layout.read_message(self._source, self._writer, in_thinking=in_thinking)

    def _turns(self, *, in_thinking: bool) -> Steps[None]:
        """Thinking, text and calls in turn."""
        if in_thinking:
            yield from self._think()
        yield from self._begin_text()
        while (
            marker := (yield from self._reader.until(self._markers, self._text.put, others=self._closing))
        ) is not None:
            if self._format.thinking is not None and marker == self._marks(self._format.thinking.begin):
                yield from self._think()
                yield from self._begin_text()
            elif marker in self._answer_end or marker in self._ends:
                self._answer_end = ()
                self._text.marker()
            else:
                yield from self._read_calls(marker)
                if self._text.is_blank:
                    yield from self._begin_text()

    @property
    def _markers(self) -> tuple[str, ...]:
        """Those that matter in the text."""
        thinking, calls = self._format.thinking, self._format.calls
        markers = () if calls is None else calls.begins
        if thinking is not None and self._marks.holds_token(thinking.begin):
            markers = (thinking.begin, *markers)
        return (*map(self._marks, markers), *self._answer_end, *self._ends)

    @property
    def _closing(self) -> tuple[str, ...]:
        """What ends calls, and may come in part behind one when the output is cut."""
        calls = self._format.calls
        return () if calls is None or not self._calls.num_calls else tuple(map(self._marks, calls.markers))

    def _think(self) -> Steps[None]:
        thinking, marks = self._format.thinking, self._marks
        assert thinking is not None
        reasoning = self._text if thinking.is_shown else Trimmed(self._writer.reasoning, after_marker=True)
        if thinking.is_shown:
            self._text.put(thinking.begin)
        else:
            self._text.marker()
        self._writer.is_thinking = True
        if thinking.heading:
            yield from self._reader.accept(thinking.heading)
        ends = tuple(map(marks, (thinking.end, *thinking.ends_before)))
        marker = yield from self._reader.until(ends, reasoning.put)
        self._writer.is_thinking = False
        if marker is None:
            reasoning.end()
        elif marker != ends[0]:
            self._reader.unread(marker)
        elif thinking.is_shown:
            self._text.put(marker)
        if not thinking.is_shown:
            self._text.marker()

    def _begin_text(self) -> Steps[None]:
        """What may stand where text begins, and nowhere else: thinking whose marker is no token, the marker of an
        answer, calls without a marker.
        """
        self._text.put((yield from self._reader.spaces()))
        thinking = self._format.thinking
        if thinking is not None and not self._marks.holds_token(thinking.begin):
            while self._text.is_blank and (yield from self._reader.accept(thinking.begin)):
                yield from self._think()
                self._text.put((yield from self._reader.spaces()))
        if thinking is not None and thinking.answer is not None:
            begin, end = map(self._marks, thinking.answer)
            if (yield from self._reader.accept(begin)):
                self._text.marker()
                self._answer_end = (end,)
                self._text.put((yield from self._reader.spaces()))
        calls = self._format.calls
        following = yield from self._reader.peek()
        if calls is not None and following and following in calls.bare and self._has_nothing:
            yield from self._read_calls("")

    @property
    def _has_nothing(self) -> bool:
        """Neither text nor calls have come."""
        return self._text.is_blank and not self._calls.num_calls

    def _read_calls(self, begin: str) -> Steps[None]:
        """Calls, or the text that it turns out to be."""
        assert self._format.calls is not None
        if begin:
            self._reader.unread(begin)
        self._reader.keep()
        self._reader.skip(len(begin))
        before = self._calls.num_calls
        self._is_in_calls = True
        try:
            yield from self._format.calls.read(self._source, self._marks.spell(begin), self._calls)
            rest = ""
        except Malformed:
            is_told = self._calls.cut() and self._reader.is_closed
            rest = "" if is_told or self._reader.is_cut_here else self._reader.kept()
        self._is_in_calls = False
        self._reader.forget()
        if self._calls.num_calls > before:
            self._text.marker()
        self._text.put(rest)
