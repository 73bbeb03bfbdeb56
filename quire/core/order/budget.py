"""What a step may still take on, and how prompts share it while a long one is among them.

A step with thousands of tokens of a long prompt takes long, and whoever comes meanwhile waits for its end. So while
short requests keep coming, steps with a long prompt are short, too, and prompts share each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.core.order.fairness import Shares
from quire.core.sequence import Sequence, SequenceStatus

SHORT_STEP_WORK = 256
"""Work of a short step on a CPU, in tokens without context. On those measured it takes some five times as long as the
shortest step, in which the weights are read for one token."""
MAX_SCORED_TOKENS = 32
"""Prompt logprobs that a step computes while others have none to compute: each takes as long as many tokens."""
CROWDED_S = 30.0
"""Seconds after a short request in which more of them are expected."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """How the work of a chunk grows with the context that it reads."""

    context_per_token: float
    """Context whose reading, in all layers, costs as much as the rest of a token's computation."""
    windows: tuple[tuple[int, float], ...] = ()
    """(window, share of the layers that read no more of the context); all other layers read everything."""
    short_step_work: float = SHORT_STEP_WORK
    """Work of a short step, in tokens without context; what it should be depends on the machine."""

    def work(self, num_computed: int, num_tokens: int) -> float:
        """Of the tokens [num_computed, num_computed + num_tokens) of a sequence."""
        return num_tokens * self._each(num_computed + num_tokens / 2)

    def tokens_for(self, num_computed: int, work: float) -> int:
        """How many tokens after `num_computed` make about so much work; at least one."""
        return max(1, int(work / self._each(num_computed)))

    def _each(self, position: float) -> float:
        """The work of one token."""
        unread = sum(share * max(0.0, position - window) for window, share in self.windows)
        return 1.0 + (position - unread) / self.context_per_token


class Portions:
    """What each prompt may have of a short step."""

    def __init__(
        self,
        long: list[Sequence],
        others: list[Sequence],
        cost: StepCost,
        *,
        next_waiting: Sequence | None,
        may_pause: bool,
    ) -> None:
        """`long` and `others` are the prompts that run, in order of rank; `next_waiting` is the next to start.

        - Long prompts pause beside short ones, if they may: not two steps in a row. So a short prompt that needs one
          step has it for itself.
        - The first long prompt, where it does not pause: half of a short step beside others, else all.
        - The others: as much as they need, the shortest first. One that does not fit leaves half of what is left while
          somebody waits to start.
        - Other long prompts: what is left beyond half a step.
        """
        self._long = long
        self._is_alone = len(long) == 1 and not others and next_waiting is None
        self._cost = cost
        self._left = cost.short_step_work
        self._tokens: dict[int, int] = {}
        for seq in sorted(others, key=lambda seq: seq.num_left):
            leaves_half = next_waiting is not None and cost.work(seq.num_computed_tokens, seq.num_left) > self._left
            self._take(seq, self._left / 2 if leaves_half else self._left)
        beside_short = bool(others) or (next_waiting is not None and self._is_short(next_waiting))
        self.is_paused = may_pause and beside_short
        if self.is_paused:
            self._tokens.update((seq.seq_id, 0) for seq in long)
        else:
            self.resume()

    def resume(self) -> None:
        """Give long prompts their portions, also where they would pause."""
        self.is_paused = False
        for seq in self._long[1:]:
            self._take(seq, self._beyond_half() / 2)
        first, work = self._long[0], self._cost.short_step_work
        self._tokens[first.seq_id] = self._cost.tokens_for(
            first.num_computed_tokens, work if self._is_alone else work / 2
        )

    def tokens_for(self, seq: Sequence, wanted: int) -> int:
        """How many of the tokens that a sequence wants it may have.

        One that has just started takes what is left; if it needs several steps anyway, what is left beyond half a step.
        """
        if seq.seq_id not in self._tokens:
            self._take(seq, self._left if self._is_short(seq) else self._beyond_half())
        return min(wanted, self._tokens[seq.seq_id])

    def has_left(self) -> bool:
        """Whether another sequence could start."""
        return self._left >= 1

    def _is_short(self, seq: Sequence) -> bool:
        return self._cost.work(seq.num_computed_tokens, seq.num_left) <= 2 * self._cost.short_step_work

    def _beyond_half(self) -> float:
        return max(0.0, self._left - self._cost.short_step_work / 2)

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
    """Prompt logprobs that it may compute; None: any number."""
    urgent: list[Sequence] = field(default_factory=list)
    """Waiting sequences that are to start in it before running prompts of a higher rank go on."""

    def for_many(self) -> int:
        """Tokens available to a sequence that wants more than one."""
        return self.num_tokens - self.num_single

    def is_full_of_urgent(self) -> bool:
        """Whether those that are to start take all that is left."""
        return sum(one.num_left for one in self.urgent) >= self.for_many()

    def beside_urgent(self, seq: Sequence, granted: int) -> int:
        """What a running prompt has of the tokens that it could have, beside those before it that are to start.

        At least one, so that a step is never empty, whatever keeps those from starting.
        """
        if not self.urgent or granted <= 1:
            return granted
        return max(1, granted - sum(one.num_left for one in self._urgent_before(seq)))

    def may_score(self, seq: Sequence) -> bool:
        """Whether a sequence could start, by the prompt logprobs that it needs."""
        return self.num_scored is None or self.num_scored > 0 or not seq.num_unscored

    def unscored_for(self, seq: Sequence, wanted: int) -> int:
        """How many of the tokens that a sequence wants it may have, by their logprobs."""
        if self.num_scored is None or not seq.num_unscored:
            return wanted
        again = max(0, seq.group.num_prompt_logprobs - seq.num_computed_tokens)
        is_urgent = any(one.num_unscored for one in self._urgent_before(seq))
        num_scored = min(1, self.num_scored) if is_urgent else self.num_scored
        return wanted if seq.num_scored_by(wanted) <= num_scored else min(wanted, again + num_scored)

    def _urgent_before(self, seq: Sequence) -> list[Sequence]:
        waiting = [one for one in self.urgent if one.status is SequenceStatus.WAITING and one.rank < seq.rank]
        return [one for one in waiting if one.group.tenant is seq.group.tenant]

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count what the step computes for a sequence."""
        if self.shares is not None:
            self.shares.charge(seq, num_tokens)
        if self.num_scored is not None and seq.group.num_prompt_logprobs_asked:
            self.num_scored = max(0, self.num_scored - seq.num_scored_by(num_tokens))
        self.num_tokens -= num_tokens
        if self.num_single and seq.num_left == 1:
            self.num_single -= 1

    def may_start_more(self) -> bool:
        """Whether there is something for another sequence."""
        return self.for_many() > 0 and (self.portions is None or self.portions.has_left())
