"""`LinearShape`: what counts of a linear layer is its shape."""

from __future__ import annotations

from dataclasses import dataclass

Shape = tuple[tuple[int, ...], int]
"""The parts and the input features of a linear layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Linear layers of one shape."""

    parts: tuple[int, ...]
    """Output features of each of the checkpoint's tensors that the layer computes at once."""
    in_features: int
    count: int = 1
    """How many layers of the model have this shape."""
    active: int | None = None
    """How many of them a token passes, one as often as it passes it; None for all."""
    dtype: str | None = None
    """What the layer is kept in, whatever the dtype and the quantisation of the model."""

    @property
    def out_features(self) -> int:
        """Of all parts."""
        return sum(self.parts)

    @property
    def num_weights(self) -> int:
        """Numbers of one layer."""
        return self.out_features * self.in_features

    @property
    def num_active(self) -> int:
        """Numbers of all layers that a token passes."""
        return self.num_weights * (self.count if self.active is None else self.active)
