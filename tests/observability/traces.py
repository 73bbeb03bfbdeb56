"""What a trace must be, by the documents of Chrome's trace event format."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
FIELDS = {"X": {"ts", "dur", "name"}, "C": {"ts", "name", "args"}, "M": {"name", "args"}, "i": {"ts", "name", "s"}}
FIELDS |= {"b": {"ts", "name", "cat", "id2"}, "e": {"ts", "name", "cat", "id2"}}


def checked(trace: Any) -> list[Event]:
    """The events of a trace that has the documented form: fields and types, and slices of a track that nest."""
    assert json.loads(json.dumps(trace)) == trace
    assert trace["displayTimeUnit"] == "ms"
    events: list[Event] = trace["traceEvents"]
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        assert FIELDS[event["ph"]] <= event.keys(), event
        assert type(event["pid"]) is type(event["tid"]) is int
        if "ts" in event:
            assert type(event["ts"]) is int
            assert event["ts"] >= 0, event
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append(event)
        if event["ph"] == "C":
            assert all(type(value) is int for value in event["args"].values())
    for slices in tracks.values():
        assert_nested(slices)
    begun = [(event["id2"]["local"], event["name"]) for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted((event["id2"]["local"], event["name"]) for event in events if event["ph"] == "e")
    return events


def assert_nested(slices: list[Event]) -> None:
    """Each slice is within the one that is open when it begins, or begins after it has ended."""
    open_ends: list[int] = []
    for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], (event, open_ends)
        open_ends.append(end)


def slices(events: list[Event], name: str) -> list[Event]:
    """The slices with this name, or that begin with it and a space."""
    return [each for each in events if each["ph"] == "X" and (each["name"] + " ").startswith(name + " ")]


def tracks(events: list[Event]) -> dict[str, int]:
    """Thread ids by the name of the track."""
    return {each["args"]["name"]: each["tid"] for each in events if each["name"] == "thread_name" and each["pid"] == 2}
