"""What the headers of a checkpoint say, for models that transformers builds: quire knows no shapes of theirs.

Everything else that the engine needs of such a model is in its `ModelArch`, read with the spec `THROUGH_TRANSFORMERS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.config_keys import ConfigKeys
from quire.config.family_spec import FamilySpec
from quire.config.layers.layer_kinds import LayerKind, all_sliding, listed_or


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The tensors in the files of a checkpoint, as numbers."""

    transformers: str
    """The version of the package that builds the model."""
    num_parameters: int
    """Of all tensors."""
    num_linear: int
    """Of the matrices, tables of the vocabulary aside: the products that one token takes, all experts among them."""
    largest: int
    """Numbers of the largest tensor."""
    largest_joined: int
    """Numbers of the largest tensor that is made of several, one for each expert; 0 where there is none."""
    widest: int
    """The largest dimension of a matrix that is not the vocabulary: what the layers compute is no wider."""
    num_experts: int
    """The most matrices that one tensor holds; 1 where each has one."""


def _unrotated(keys: ConfigKeys, kinds: tuple[LayerKind, ...]) -> tuple[bool, ...]:
    """The model rotates queries and keys itself."""
    return (False,) * len(kinds)


THROUGH_TRANSFORMERS = FamilySpec(
    defaults={"hidden_act": "unknown", "sliding_window": None},
    layer_kinds=listed_or(all_sliding),
    rotated=_unrotated,
)
"""How a config is read that `models.fallback.config` has put into Llama's spelling."""
