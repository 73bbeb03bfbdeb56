"""How long a step takes, from counts of what is in it.

Decoding reads the keys and values of each sequence once: that costs by the token of context. A chunk of a prompt
compares each of its tokens with all before it: that costs by the pair. All other terms are linear as well, apart from
the first tokens of a step, which are free where the device waits for the weights anyway (a roofline).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from quire.config.json_file import read_json_object
from quire.errors import ConfigError, shown
from quire.messages.step import SchedulerOutputs
from quire.utils.lazy import nearest
from quire.worker.graph_cache import GraphCache

MAX_COST_BYTES = 1 << 20
"""Of a file with a cost model; one has less than 1 KiB."""
SHORT_STEP_LOSS = 1 / 6
"""Share of the time of a long prompt's tokens that short steps may add: what a short step of 256 tokens adds on a CPU
whose weights take as long to read as 43 tokens to compute."""
MAX_SPREAD = 8192
"""Values of `CostModel.spread`."""
SPREAD_RUN = 128
"""Steps that take values of a spread which follow one another: what slows a machine lasts for longer than a step."""
SPREADS = ("spread", "prompt_spread")
MAX_TERM = 1e6
"""Seconds or tokens; no term of a step is larger."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """Counts of what a step computes."""

    num_tokens: int
    num_context_tokens: int
    """Tokens whose keys and values are read, summed over the sequences: their own of this step included."""
    num_pairs: int
    """Pairs of a token and one before it (or itself), summed over the chunks of more than one token."""
    num_sequences: int
    num_draws: int
    """Tokens that are sampled."""
    num_alike: int = 0
    """Steps in a row, this one the last, that only decode for the same sequences; 0 of a step with a prompt."""
    is_after_idle: bool = False
    """Whether there was nothing to do before the step."""
    is_recorded: bool = False
    """Whether none of the last steps had as many tokens, sequences and sampled rows, so that its graph is recorded."""


class Batches:
    """Knows of each step whether its batch is that of the step before, whether there was one, and whether one of its
    size came lately."""

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps so far."""
        self._graphs = GraphCache[None]()
        self._last: list[int] = []
        self._num_alike = 0
        """See `StepShape.num_alike`; of the last step."""
        self._is_idle = True

    def idle(self) -> None:
        """There is nothing to do after the last step."""
        self._last, self._is_idle = [], True

    def wake(self) -> bool:
        """Whether there was nothing to do before a step. To be asked for each."""
        was_idle, self._is_idle = self._is_idle, False
        return was_idle

    def num_alike(self, seq_ids: list[int], has_prompt: bool) -> int:
        """See `StepShape.num_alike`. To be asked for each step."""
        before, self._last = self._last, [] if has_prompt else seq_ids
        self._num_alike = 0 if has_prompt else self._num_alike + 1 if before == seq_ids else 1
        return self._num_alike

    def repeat(self, num_steps: int) -> None:
        """So many steps are made that are like the one asked for last, that one included."""
        self.num_steps += num_steps
        self._num_alike += num_steps - 1

    def is_recorded(self, num_tokens: int, num_sequences: int, num_sampled: int) -> bool:
        """Whether the worker records the graph of a step of this size. To be asked for each."""
        size = num_tokens, num_sequences, num_sampled
        has_graph = size in self._graphs
        self._graphs.get(size, lambda: None)
        return not has_graph


def shape_of(plan: SchedulerOutputs, batches: Batches) -> StepShape:
    """The counts of a planned step. `batches` is told of it."""
    num_pairs = 0
    if plan.num_batched_tokens > len(plan.seq_ids):
        chunks = zip(plan.num_computed_tokens, plan.num_scheduled_tokens, strict=True)
        num_pairs = sum(count * before + count * (count + 1) // 2 for before, count in chunks if count > 1)
    batches.num_steps += 1
    return StepShape(
        num_tokens=plan.num_batched_tokens,
        num_context_tokens=sum(plan.num_computed_tokens) + plan.num_batched_tokens,
        num_pairs=num_pairs,
        num_sequences=len(plan.seq_ids),
        num_draws=sum(plan.num_draws),
        num_alike=batches.num_alike(plan.seq_ids, num_pairs > 0),
        is_after_idle=batches.wake(),
        is_recorded=batches.is_recorded(
            plan.num_batched_tokens, len(plan.seq_ids), len(plan.num_draws) - plan.num_draws.count(0)
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step by what is in it."""

    fixed_s: float
    """Of every step: reading the weights, launching kernels, deciding and learning."""
    token_s: float
    """Of a token beyond `free_tokens`."""
    context_token_s: float = 0.0
    prompt_s: float = 0.0
    """Of a step with a prompt in it: requests begin, and none of the steps before was like it."""
    new_batch_s: float = 0.0
    """Of a step that only decodes, for other sequences than the step before or after a prompt; half of it of the step
    after that, a third of the next: so caches and cores get used to a batch."""
    idle_s: float = 0.0
    """Of a step before which there was nothing to do: cores have slept, caches are others', and it begins with the
    arrival of a request, not with the end of the step before."""
    record_s: float = 0.0
    """Of a step of a size that came for the first time, or not for long: the graph of its ops is recorded."""
    pair_s: float = 0.0
    sequence_s: float = 0.0
    draw_s: float = 0.0
    free_tokens: float = 0.0
    """Tokens of a step that are computed while its weights are read."""
    spread: tuple[float, ...] = ()
    """By what steps of one shape that only decode differ, as multiples of what the terms say, in the order in which
    they came. Without any they take the same time."""
    prompt_spread: tuple[float, ...] = ()
    """The same of steps with a prompt: they are longer, and what disturbs them is a smaller share of them."""
    source: str = ""
    """Where the numbers come from, for people."""

    def base_s(self, shape: StepShape) -> float:
        """Seconds of a step, without the reading of context."""
        return (
            self.fixed_s
            + max(0.0, shape.num_tokens - self.free_tokens) * self.token_s
            + (self.prompt_s if shape.num_pairs else 0.0)
            + shape.num_pairs * self.pair_s
            + shape.num_sequences * self.sequence_s
            + shape.num_draws * self.draw_s
            + (self.idle_s if shape.is_after_idle else 0.0)
            + (self.record_s if shape.is_recorded else 0.0)
            + (self.new_batch_s / shape.num_alike if shape.num_alike else 0.0)
        )

    def step_s(self, shape: StepShape) -> float:
        """Seconds of a step."""
        return self.base_s(shape) + shape.num_context_tokens * self.context_token_s

    def factor(self, step: int, *, has_prompt: bool) -> float:
        """By what a step differs from others of its shape; `step` is its number. The same in every run.

        Steps take values that follow one another, `SPREAD_RUN` of them from some place, so that a slow time lasts as
        long as it did (the moving-block bootstrap: Künsch, Annals of Statistics 1989).
        """
        spread = self.prompt_spread if has_prompt else self.spread
        run, place = divmod(step, SPREAD_RUN)
        return spread[(_mixed(run) + place) % len(spread)] if spread else 1.0

    @property
    def short_step_work(self) -> float:
        """Tokens without context in the shortest step that computes them nearly as fast as an endless one would.

        That is how long a step beside a long prompt should be: in longer ones others wait longer, and shorter ones
        delay the long prompt by more than `SHORT_STEP_LOSS`.
        """
        if not self.token_s:
            return math.inf
        overhead = max(0.0, (self.fixed_s + self.prompt_s) / self.token_s - self.free_tokens)
        num_tokens = overhead / SHORT_STEP_LOSS
        if num_tokens >= self.free_tokens:
            return num_tokens
        return (self.free_tokens + overhead) / (1 + SHORT_STEP_LOSS)

    def as_dict(self) -> dict[str, Any]:
        """As a file holds it."""
        return asdict(self)


def _mixed(number: int) -> int:
    """A number whose bits look random, another one for each (splitmix64: Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31


_WORD = (1 << 64) - 1


def read_cost(name: str) -> CostModel:
    """The cost model in a file that `quire bench steps` wrote.

    Raises: ConfigError naming the file and what is wrong with it.
    """
    remedy = "`quire bench steps --output-json FILE` writes one."
    value = read_json_object(Path(name), remedy, most_bytes=MAX_COST_BYTES)
    if value is None:
        raise ConfigError(f"--cost {name}: there is no such file. {remedy}")
    terms = value.get("cost", value)
    if not isinstance(terms, dict):
        raise ConfigError(f"--cost {name}: cost must be an object, got {shown(terms)}. {remedy}")
    known = [field.name for field in fields(CostModel)]
    for term, number in terms.items():
        if term not in known:
            raise ConfigError(f"--cost {name}: unknown term {shown(term)}{nearest(term, known)}")
        _check_term(name, term, number)
    for term in ("fixed_s", "token_s"):
        if term not in terms:
            raise ConfigError(f"--cost {name}: {term} is missing. {remedy}")
    cost = CostModel(**{**terms, **{term: tuple(terms.get(term, ())) for term in SPREADS}})
    if cost.fixed_s <= 0:
        raise ConfigError(f"--cost {name}: fixed_s must be above 0, or a step may take no time")
    return cost


def _check_term(name: str, term: str, number: object) -> None:
    if term == "source":
        if not isinstance(number, str):
            raise ConfigError(f"--cost {name}: source must be a text, got {shown(number)}")
    elif term in SPREADS:
        _check_spread(name, term, number)
    elif isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ConfigError(f"--cost {name}: {term} must be a number, got {shown(number)}")
    elif not math.isfinite(number) or not 0 <= number <= MAX_TERM:
        raise ConfigError(f"--cost {name}: {term} must be from 0 to {MAX_TERM:g}, got {number}")


def _check_spread(name: str, term: str, values: object) -> None:
    if not isinstance(values, list) or len(values) > MAX_SPREAD:
        raise ConfigError(f"--cost {name}: {term} must be a list of at most {MAX_SPREAD} numbers, got {shown(values)}")
    for value in values:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 < value <= MAX_TERM:
            raise ConfigError(
                f"--cost {name}: values of {term} must be above 0 and at most {MAX_TERM:g}, got {shown(value)}"
            )
