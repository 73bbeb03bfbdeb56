"""Where the time of a request went, from the numbers that came with its last output."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from quire.messages.stats import Phase, RequestEffort, Span
from quire.outputs import RequestOutput

NAMES = {phase: f"{phase.value}_s" for phase in Phase} | {Phase.QUEUED: "queue_s"}
"""What an explanation calls the seconds in a phase."""


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
        if stats is None:
            return facts
        times = {"front_s": stats.arrived_at - self.started_at}
        times |= {NAMES[phase]: effort.phase_s.get(phase, 0.0) for phase in Phase}
        times["delivery_s"] = self.finished_at - effort.phase_at
        facts |= {name: round(seconds, 6) for name, seconds in times.items()}
        facts["held_s"] = {name.value: round(seconds, 6) for name, seconds in effort.held_s.items()}
        facts["timeline"] = [self._shown(span) for span in effort.spans]
        facts["timeline_left_out"] = effort.num_more_spans
        return facts

    def _shown(self, span: Span) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "phase": span.phase.value,
            "at_s": round(span.started_at - self.started_at, 6),
            "s": round(span.ended_at - span.started_at, 6),
        }
        if span.num_steps:
            shown |= {"first_step": span.first_step, "steps": span.num_steps, "tokens": span.num_tokens}
        if span.waited_for:
            shown["waited_for"] = {name.value: round(seconds, 6) for name, seconds in span.waited_for.items()}
        if span.branch >= 0:
            shown["branch"] = span.branch
        return shown
