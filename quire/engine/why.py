"""Where the time of a request went, from the numbers that came with its last output."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from quire.messages.stats import RequestEffort
from quire.outputs import RequestOutput


@dataclass(slots=True)
class Timeline:
    """One request from outside: what its outputs say together. Times are seconds, of `time.monotonic()`."""

    started_at: float
    """When the request came in, before it was parsed and tokenised."""
    finished_at: float = 0.0
    last: RequestOutput | None = None
    num_output_tokens: dict[int, int] = field(default_factory=dict)
    """By completion."""

    def add(self, output: RequestOutput) -> None:
        """Take in the next delta, or the one final output."""
        self.last = output
        self.finished_at = time.monotonic()
        for completion in output.outputs:
            before = self.num_output_tokens.get(completion.index, 0)
            self.num_output_tokens[completion.index] = before + len(completion.token_ids)

    def explain(self) -> dict[str, Any]:
        """The answer to `x-quire-why: 1`; the times add up to `total_s`."""
        output = self.last
        assert output is not None
        stats, effort = output.metrics, output.effort or RequestEffort()
        counts = self.num_output_tokens.values()
        facts: dict[str, Any] = {
            "total_s": round(self.finished_at - self.started_at, 6),
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "computed_tokens": effort.num_computed_tokens,
            "output_tokens": sum(counts),
            "prefill_steps": effort.num_prefill_steps,
            "decode_steps": max(0, max(counts, default=0) - 1),
            "queued_steps": {name.value: count for name, count in effort.held_steps.items()},
            "preemptions": 0 if stats is None else stats.num_preemptions,
            "replays": effort.num_replays,
        }
        held = {name: count for name, count in effort.held_steps.items() if count}
        facts["bound_by"] = max(held, key=lambda name: held[name]).value if held else None
        if stats is None or not stats.first_token_at:
            return facts
        times = {
            "front_s": stats.arrived_at - self.started_at,
            "queue_s": stats.scheduled_at - stats.arrived_at,
            "prefill_s": stats.first_token_at - stats.scheduled_at,
            "decode_s": stats.last_token_at - stats.first_token_at,
            "delivery_s": self.finished_at - stats.last_token_at,
        }
        return facts | {name: round(seconds, 6) for name, seconds in times.items()}
