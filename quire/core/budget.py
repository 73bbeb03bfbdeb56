"""What a step may still take on, and how prompts share it while a long one is among them.

A step with thousands of tokens of a long prompt takes long, and whoever comes meanwhile waits for its end. So while
short requests keep coming, steps with a long prompt are short, too, and half of each is left to the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.fairness import Shares
from quire.core.sequence import Sequence

SHORT_STEP_WORK = 256
"""Work of a short step, in tokens without context. On the CPUs measured it takes some five times as long as the
shortest step, in which the weights are read for one token."""
MAX_SCORED_TOKENS = 64
"""Prompt tokens whose logprobs a step computes while others generate: each takes as long as many tokens without."""
CROWDED_STEPS = 16
"""A request counts as one of many until so many full steps' tokens were computed after it came."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """How the work of a chunk grows with the context that it reads."""

    context_per_token: float
    """Context whose reading costs as much as the rest of a token's computation."""

    def work(self, num_computed: int, num_tokens: int) -> float:
        """Of the tokens [num_computed, num_computed + num_tokens) of a sequence."""
        return num_tokens * (1.0 + (num_computed + num_tokens / 2) / self.context_per_token)

    def tokens_for(self, num_computed: int, work: float) -> int:
        """How many tokens after `num_computed` make about so much work; at least one."""
        return max(1, int(work / (1.0 + num_computed / self.context_per_token)))


class Portions:
    """What each prompt may have of a short step."""

    def __init__(
        self, long: list[Sequence], others: Iterable[Sequence], cost: StepCost, *, somebody_waits: bool
    ) -> None:
        """`long` and `others` are the prompts that run, in order of rank.

        The first long one has half of the step, and all that nobody else wants. The rest is for the others, those with
        the least to compute first; the other long ones, and all while somebody waits to start, leave half of it.
        """
        self._cost = cost
        self._left = SHORT_STEP_WORK / 2
        self._tokens: dict[int, int] = {}
        for seq in sorted(others, key=lambda seq: seq.num_left):
            self._take(seq, self._left / 2 if somebody_waits else self._left)
        for seq in long[1:]:
            self._take(seq, self._left / 2)
        most = SHORT_STEP_WORK / 2 + (0 if somebody_waits else self._left)
        self._tokens[long[0].seq_id] = cost.tokens_for(long[0].num_computed_tokens, most)

    def tokens_for(self, seq: Sequence, wanted: int) -> int:
        """How many of the tokens that a sequence wants it may have; one that has just started takes what is left."""
        if seq.seq_id not in self._tokens:
            self._take(seq, self._left)
        return min(wanted, self._tokens[seq.seq_id])

    def has_left(self) -> bool:
        """Whether another sequence could start."""
        return self._left >= 1

    def _take(self, seq: Sequence, most: float) -> None:
        num_tokens = min(seq.num_left, self._cost.tokens_for(seq.num_computed_tokens, most))
        self._tokens[seq.seq_id] = num_tokens
        self._left = max(0.0, self._left - self._cost.work(seq.num_computed_tokens, num_tokens))


@dataclass(slots=True)
class StepBudget:
    """What a step may still take on."""

    num_tokens: int
    num_single: int = 0
    """Running sequences that need one token and have not been given it yet: theirs is set aside."""
    shares: Shares | None = None
    """What each tenant may have of it, while there are several."""
    portions: Portions | None = None
    """What each prompt may have of it, while a long one is computed and others keep coming."""
    num_scored: int | None = None
    """Prompt tokens whose logprobs it may compute; None: any number."""

    def for_many(self) -> int:
        """Tokens available to a sequence that wants more than one."""
        return self.num_tokens - self.num_single

    def unscored_for(self, seq: Sequence, wanted: int) -> int:
        """How many of the tokens that a sequence wants it may have, by their logprobs."""
        if self.num_scored is None or not seq.num_unscored:
            return wanted
        return min(wanted, self.num_scored)

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count what the step computes for a sequence."""
        if self.shares is not None:
            self.shares.charge(seq, num_tokens)
        if self.num_scored is not None:
            self.num_scored = max(0, self.num_scored - min(num_tokens, seq.num_unscored))
        self.num_tokens -= num_tokens
        if seq.num_left == 1:
            self.num_single = max(0, self.num_single - 1)

    def may_start_more(self) -> bool:
        """Whether there is something for another sequence."""
        return self.for_many() > 0 and (self.portions is None or self.portions.has_left())
