"""What the requests of an API key do in the core: asked for while somebody watches, and not often."""

from __future__ import annotations

import asyncio
import re

from typing_extensions import TypedDict

from quire.engine.async_llm_engine import AsyncLLMEngine
from quire.errors import EngineError
from quire.messages.stats import ActiveRequest, Activity

FRESH_S = 0.4
"""A report is given again for this long, so that many watchers with one key cost the core as much as one."""
PATIENCE_S = 0.25
"""A core in a long step answers after it; until then what it said before is given."""


class SequenceActivity(TypedDict):
    """One branch."""

    branch: int
    state: str
    """queued, preempted, prompt or output."""
    computed_tokens: int
    output_tokens: int
    blocks: int
    own_blocks: int
    """Those that no other sequence uses."""


class RequestActivity(TypedDict):
    """One request. Times are seconds; each stage ends where the next begins."""

    id: str
    n: int
    """Branches."""
    prompt_tokens: int
    cached_tokens: int | None
    """None while the prompt was not looked up in the prefix cache."""
    max_tokens: int
    """Of each branch."""
    arrived_s: float
    """Ago."""
    queue_s: float
    prefill_s: float | None
    """None before it was scheduled."""
    decode_s: float | None
    """None before its first token."""
    preemptions: int
    replays: int
    prefill_steps: int
    computed_tokens: int
    queued_steps: dict[str, int]
    """Steps that went by while it was queued, by what bound them."""
    sequences: list[SequenceActivity]


class KeyActivity(TypedDict):
    """What the requests of the asking API key do; without keys, all requests."""

    age_s: float
    num_running: int
    num_waiting: int
    num_keys: int
    """API keys with unfinished requests."""
    requests: list[RequestActivity]
    """At most 100 sequences, the running ones first."""


class ActivityReports:
    """The latest report of each tenant. Asks the core one thing at a time for each of them."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self._latest: dict[str, tuple[float, Activity]] = {}
        self._asked: dict[str, asyncio.Future[Activity]] = {}

    async def of(self, tenant: str) -> KeyActivity | None:
        """What a tenant's requests do, as the core said a moment ago; None while it has said nothing."""
        now = asyncio.get_running_loop().time
        if tenant not in self._latest or now() - self._latest[tenant][0] > FRESH_S:
            asked = self._asked.get(tenant) or self._ask(tenant)
            if asked is not None:
                await asyncio.wait([asked], timeout=PATIENCE_S)
        if tenant not in self._latest:
            return None
        at, activity = self._latest[tenant]
        return _shown(activity, now() - at)

    def _ask(self, tenant: str) -> asyncio.Future[Activity] | None:
        asked = self._engine.activity(tenant)
        if asked is None:
            self._latest.pop(tenant, None)
        else:
            self._asked[tenant] = asked
            asked.add_done_callback(lambda done: self._take(tenant, done))
        return asked

    def _take(self, tenant: str, done: asyncio.Future[Activity]) -> None:
        del self._asked[tenant]
        self._latest.pop(tenant, None)
        if not done.cancelled() and not isinstance(done.exception(), EngineError):  # the core has ended
            self._latest[tenant] = (done.get_loop().time(), done.result())


def _shown(activity: Activity, age_s: float) -> KeyActivity:
    return {
        "age_s": round(age_s, 3),
        "num_running": activity.num_running,
        "num_waiting": activity.num_waiting,
        "num_keys": activity.num_tenants,
        "requests": [_request(request, activity.taken_at) for request in activity.requests],
    }


def _request(request: ActiveRequest, now: float) -> RequestActivity:
    stats, effort = request.stats, request.effort
    scheduled_at, first_token_at = stats.scheduled_at or now, stats.first_token_at or now
    return {
        "id": _public_id(request.request_id),
        "n": request.num_branches,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": None if request.num_cached_tokens < 0 else request.num_cached_tokens,
        "max_tokens": request.max_tokens,
        "arrived_s": round(now - stats.arrived_at, 6),
        "queue_s": round(scheduled_at - stats.arrived_at, 6),
        "prefill_s": round(first_token_at - scheduled_at, 6) if stats.scheduled_at else None,
        "decode_s": round(now - first_token_at, 6) if stats.first_token_at else None,
        "preemptions": stats.num_preemptions,
        "replays": effort.num_replays,
        "prefill_steps": effort.num_prefill_steps,
        "computed_tokens": effort.num_computed_tokens,
        "queued_steps": {name.value: count for name, count in effort.held_steps.items()},
        "sequences": [
            {
                "branch": seq.branch,
                "state": _state(request, seq.is_running, seq.num_computed_tokens),
                "computed_tokens": seq.num_computed_tokens,
                "output_tokens": seq.num_output_tokens,
                "blocks": seq.num_blocks,
                "own_blocks": seq.num_own_blocks,
            }
            for seq in request.sequences
        ],
    }


def _state(request: ActiveRequest, is_running: bool, num_computed_tokens: int) -> str:
    if not is_running:
        return "preempted" if request.stats.num_preemptions else "queued"
    return "prompt" if num_computed_tokens < request.num_prompt_tokens else "output"


def _public_id(core_id: str) -> str:
    """The id without what fronts and engine add to it: `FRONT:` before and `#NUMBER` behind."""
    return re.sub(r"^\d+:|#\d+$", "", core_id)
