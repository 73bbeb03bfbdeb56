"""What a decoder has beside its layers: several hidden states of each token in place of one, and embeddings of each
layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Streams that take turns (AltUp, https://arxiv.org/abs/2301.13310), as Gemma 3n has them.

    A layer predicts all streams from all of them, computes one, and corrects all by how far the prediction of that one
    was off. What the layer reads has a low-rank copy added beside attention (LAuReL, https://arxiv.org/abs/2411.07501),
    and what it gives is joined by an embedding of the token that is the layer's own. `models/gemma3n.py` computes it.
    """

    count: int
    active: int
    """The stream that layers compute."""
    scales_active: bool
    """Whether the layer's own embedding meets the computed stream times a weight for each feature."""
    laurel_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperSpec:
    """Streams that every half of a layer reads and writes (hyper-connections, https://arxiv.org/abs/2409.19606).

    Numbers of each token say how much of each stream the half reads, how much of what it gives is added to each, and
    how the streams are mixed, by a matrix whose rows and columns add up to one. `models/deepseek_v4.py` computes it.
    """

    count: int
    iterations: int
    """By which rows and columns are divided by their sums, in turns (Sinkhorn and Knopp)."""
    eps: float
    """Added to sums, and to what is read."""

    @property
    def num_products(self) -> int:
        """Numbers of a token for one half: what is read, what is added, and the matrix."""
        return self.count * (2 + self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbeddingsSpec:
    """Embeddings of each token, one for each layer, joined by a product of the token's own embedding.

    They are added behind the layer, gated by what it gives. `models/layer_embeddings.py` computes it.
    """

    size: int
    vocab_size: int
    """Tokens that have such embeddings; all others have those of token 0."""
