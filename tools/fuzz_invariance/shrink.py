"""From a case that fails to a smaller one that fails, too: what can be left out is left out, one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tools.fuzz_invariance.cases import WHOSE, Case, EngineChoice, Event, RequestChoice

MAX_TRIES = 300


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The smallest failing case that was found in `MAX_TRIES` runs."""
    tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(case):
            tries += 1
            if tries > MAX_TRIES:
                return case
            if fails(smaller):
                case, is_smaller = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, those first that leave out most."""
    for index in range(len(case.requests) - 1, -1, -1):
        if len(case.requests) > 1:
            yield _without_request(case, index)
    for index in range(len(case.events)):
        yield replace(case, events=(*case.events[:index], *case.events[index + 1 :]))
    for engine in _plainer_engines(case.engine):
        yield replace(case, engine=engine)
    for index, request in enumerate(case.requests):
        for plainer in _plainer_requests(request):
            yield replace(case, requests=(*case.requests[:index], plainer, *case.requests[index + 1 :]))


def _without_request(case: Case, index: int) -> Case:
    """Later requests move up; what refers to the one that is gone refers to nobody, or goes with it."""

    def moved(number: int) -> int:
        return number - (number > index)

    requests = [
        replace(request, follows=None if request.follows in (None, index) else moved(request.follows))
        for request in (*case.requests[:index], *case.requests[index + 1 :])
    ]
    events: list[Event] = [
        replace(event, request=moved(event.request))
        for event in case.events
        if event.kind not in WHOSE or event.request != index
    ]
    return replace(case, requests=tuple(requests), events=tuple(events))


def _plainer_engines(engine: EngineChoice) -> Iterator[EngineChoice]:
    usual = EngineChoice()
    for field in fields(engine):
        if getattr(engine, field.name) != getattr(usual, field.name):
            yield replace(engine, **{field.name: getattr(usual, field.name)})


def _plainer_requests(request: RequestChoice) -> Iterator[RequestChoice]:
    for name in request.params:
        if name != "max_tokens":
            yield replace(request, params={key: value for key, value in request.params.items() if key != name})
    if request.params.get("max_tokens", 1) > 1:
        yield replace(request, params={**request.params, "max_tokens": request.params["max_tokens"] // 2})
    usual = RequestChoice(token_ids=request.token_ids)
    for field in fields(request):
        if field.name != "params" and getattr(request, field.name) != getattr(usual, field.name):
            yield replace(request, **{field.name: getattr(usual, field.name)})
    if len(request.token_ids) > 1:
        yield replace(request, token_ids=request.token_ids[: len(request.token_ids) // 2])
