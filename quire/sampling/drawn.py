"""`DrawnTokens`: one token for each row of a step, left on the device that drew it until somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.messages.output import Failure, PositionLogprobs
from quire.sampling.logprobs import logprobs_of


@dataclass(slots=True)
class SampledTokens:
    """What was drawn, by row of the batch."""

    token_ids: list[list[int]]
    """The tokens of each row; none where it failed."""
    logprobs: list[list[PositionLogprobs] | None]
    """One entry for each drawn token where the request asked, else None."""
    errors: dict[int, Failure] = field(default_factory=dict)
    """Row -> why it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What `Ops.top_logprobs` gives for the rows that report."""

    columns: tuple[Tensor, Tensor, Tensor, Tensor]
    rows: Sequence[int]
    """Of the batch."""
    widths: Sequence[int]
    """Candidates of each that are reported."""


def not_finite(position: int, largest: float) -> Failure:
    """Why no token was drawn at a position, from the largest logit there."""
    return Failure(
        f"the model's logits for token {position} are not finite (the largest is {largest}); "
        "its weights may be damaged or overflow in this dtype: try dtype=float32"
    )


class DrawnTokens:
    """What a step has drawn, on its way to the host."""

    def __init__(
        self, token_ids: Tensor, largest: Tensor, positions: Sequence[int], candidates: Candidates | None = None
    ) -> None:
        """`largest`: each row's largest logit. Shapes: [R] int64, [R] float32, [R]."""
        self.token_ids = token_ids
        self.positions = positions
        """Where each token stands in its sequence."""
        self._token_ids, self._largest = _HostCopy(token_ids), _HostCopy(largest)
        self._candidates = candidates
        self._columns = [] if candidates is None else [_HostCopy(column) for column in candidates.columns]

    def read(self) -> SampledTokens:
        """The token of each row, and why rows failed. Waits for this step, for no later one."""
        token_ids = [[token_id] for token_id in self._token_ids.read().tolist()]
        errors = {
            row: not_finite(self.positions[row], value)
            for row, value in enumerate(self._largest.read().tolist())
            if not math.isfinite(value)
        }
        logprobs: list[list[PositionLogprobs] | None] = [None] * len(token_ids)
        if self._candidates is not None:
            rows, widths = self._candidates.rows, self._candidates.widths
            chosen = [token_ids[row][0] for row in rows]
            positions = logprobs_of(chosen, widths, [column.read() for column in self._columns])
            for row, position in zip(rows, positions, strict=True):
                logprobs[row] = [] if row in errors else [position]
        return SampledTokens([[] if row in errors else found for row, found in enumerate(token_ids)], logprobs, errors)


class _HostCopy:
    """A copy of a tensor that the device makes when it comes to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self._host = tensor
        if tensor.device.type != "cpu":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def read(self) -> Tensor:
        """The copy, when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
