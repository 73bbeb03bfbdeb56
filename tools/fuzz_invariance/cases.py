"""What a case consists of: an engine, requests that arrive at chosen steps, and what disturbs them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

MAX_MODEL_LEN = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """How the engine under test is built. The defaults are those of an engine without any pressure."""

    model: str = "full"
    """A key of `engines.MODELS`."""
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    ops: str = "cpu"
    block_size: int = 16
    num_threads: int = 1
    num_spare_blocks: int = 500
    """Blocks beyond those that the longest sequence needs."""
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    blocks_per_state: int = 1
    """Blocks from one cached state of recurrent layers to the next, where a model has such layers."""
    num_ram_pages: int = 0
    """KV blocks kept in memory below the pool."""
    policy: str = "fcfs"
    priority_ageing_s: float = 0.0
    max_steps_in_flight: int = 1
    """With more than one, steps are computed beside the core, and take some time."""
    grammar_steps: int = 0
    """Steps after which a request that has a grammar may start: what compiling it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChoice:
    """One request."""

    token_ids: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    """Of `SamplingParams`."""
    arrives_at: int = 0
    """The step before which it is added."""
    follows: int | None = None
    """Its prompt begins with the prompt of this earlier request and what its first branch has given by then."""
    cache_salt: str | None = None
    tenant: str = ""
    priority: int = 0


class Kind(StrEnum):
    """What can happen between two steps."""

    ABORT = "abort"
    """The client gives the request up."""
    POISON = "poison"
    """From now on a step raises when the request is part of it."""
    POISON_LATE = "poison late"
    """The same, but when the step has been computed."""
    INTERRUPT = "interrupt"
    """The next step is computed and its result is lost; the scheduler starts over."""
    WITHDRAW = "withdraw"
    """The request leaves the core and is added again."""
    TRIAL = "trial"
    """The request runs alone until it has a new token; the others are set aside."""
    MOVE = "move"
    """All requests move to a new core, which has an empty cache."""
    CRASH = "crash"
    """A step is computed and nobody hears of it; a new core gets what the front knows."""
    FORGET = "forget"
    """The prefix cache is emptied."""


WHOSE = frozenset({Kind.ABORT, Kind.POISON, Kind.POISON_LATE, Kind.WITHDRAW, Kind.TRIAL})
"""Events that concern one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happens before a step."""

    at: int
    kind: Kind
    request: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that is decided before the first step."""

    seed: int
    engine: EngineChoice
    requests: tuple[RequestChoice, ...]
    events: tuple[Event, ...] = ()

    def describe(self) -> str:
        """Several lines for people: only what is not as usual."""
        lines = [f"seed {self.seed}", f"engine {_changed(self.engine)}"]
        lines += [f"request {index}: {_changed(request)}" for index, request in enumerate(self.requests)]
        for event in self.events:
            whose = f" request {event.request}" if event.kind in WHOSE else ""
            lines.append(f"before step {event.at}: {event.kind}{whose}")
        return "\n  ".join(lines)


def _changed(choice: EngineChoice | RequestChoice) -> str:
    """The fields that differ from their defaults."""
    values = [(f.name, getattr(choice, f.name), f.default) for f in fields(choice)]
    return ", ".join(f"{name}={value!r}" for name, value, default in values if value != default and value != {})
