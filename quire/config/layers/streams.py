"""What a decoder has beside its layers: several hidden states of each token in place of one, and embeddings of each
layer."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.config_keys import ConfigKeys, is_number

MAX_STREAMS = 64
MAX_ITERATIONS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Streams that take turns (AltUp, https://arxiv.org/abs/2301.13310), as Gemma 3n has them.

    A layer predicts all streams from all of them, computes one, and corrects all by how far the prediction of that one
    was off. What the layer reads has a low-rank copy added beside attention (LAuReL, https://arxiv.org/abs/2411.07501),
    and what it gives is joined by an embedding of the token that is the layer's own. `models/variants/gemma3n.py`
    computes it.
    """

    count: int
    active: int
    """The stream that layers compute."""
    scales_active: bool
    """Whether the layer's own embedding meets the computed stream times a weight for each feature."""
    laurel_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SphereSpec:
    """Hidden states of length 1, which attention and MLP move (nGPT, https://arxiv.org/abs/2410.01131), and layers in
    the middle that all tokens pass several times (Dory). `models/variants/dory.py` computes it.

    The checkpoint has what multiplies features divided by numbers: those here, but for `query` and `gate` without
    their squares.
    """

    num_before: int
    """Layers before those that are passed several times."""
    num_repeated: int
    num_loops: int
    rate: float
    """Of the share of each feature that a layer's half replaces."""
    query: float
    """Of the root of what multiplies queries behind their rotation."""
    gate: float
    """Of the root of what multiplies gates of attention."""
    inner: float
    """Of what multiplies the gate and the other product of an MLP."""
    logits: float

    @property
    def num_first(self) -> int:
        """Layers up to the end of the first pass through the middle."""
        return self.num_before + self.num_repeated

    def layer_of(self, index: int) -> int:
        """The checkpoint's layer by which tokens pass the layer with this index."""
        if index < self.num_first:
            return index
        beyond = index - self.num_first
        num_again = self.num_repeated * (self.num_loops - 1)
        return self.num_before + beyond % self.num_repeated if beyond < num_again else index - num_again


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperSpec:
    """Streams that every half of a layer reads and writes (hyper-connections, https://arxiv.org/abs/2409.19606).

    Numbers of each token say how much of each stream the half reads, how much of what it gives is added to each, and
    how the streams are mixed, by a matrix whose rows and columns add up to one.
    `models/variants/hyper_connections.py` computes it.
    """

    count: int
    iterations: int = 0
    """By which rows and columns are divided by their sums, in turns (Sinkhorn and Knopp); 0 where there is no matrix:
    streams are not mixed."""
    eps: float
    """Added to sums, and to what is read."""
    magnitude: float = 2.0
    """Of the sigmoids that say what is added."""
    least_added: float = 0.0
    """Added to that."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of a token for one half: what is read, what is added, and the matrix."""
        return (self.count, self.count, self.count**2) if self.iterations else (self.count, self.count)

    @property
    def num_products(self) -> int:
        """All of them."""
        return sum(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreamsSpec:
    """Streams of which every half of a layer reads a mean that gates of each feature weigh (Qwen4-Exp).

    The gates are a product of low rank of all streams behind a norm; numbers of each token say how much of what the
    half gives is added to each stream. `models/variants/gated_streams.py` computes it.
    """

    count: int
    rank: int
    """Features between the two products that give the gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbeddingsSpec:
    """Embeddings of each token, one for each layer, joined by a product of the token's own embedding.

    They are added behind the layer, gated by what it gives. `models/variants/layer_embeddings.py` computes it.
    """

    size: int
    vocab_size: int
    """Tokens that have such embeddings; all others have those of token 0."""


def mixed_streams(keys: ConfigKeys) -> HyperSpec:
    """Hyper-connections with a matrix (DeepSeek V4)."""
    iterations = keys.count("hc_sinkhorn_iters", most=MAX_ITERATIONS)
    return HyperSpec(count=keys.count("hc_mult", most=MAX_STREAMS), iterations=iterations, eps=_eps(keys))


def apart_streams(keys: ConfigKeys) -> HyperSpec:
    """Hyper-connections without one (HY V4)."""
    count, magnitude, eps = keys.count("hc_mult", most=MAX_STREAMS), keys.positive("hc_magnitude"), _eps(keys)
    return HyperSpec(count=count, eps=eps, magnitude=magnitude, least_added=eps)


def gated_streams(keys: ConfigKeys) -> GatedStreamsSpec:
    """Streams behind gates."""
    count = keys.count("hc_count", most=MAX_STREAMS)
    if count == 1:
        keys.refuse("hc_count", count, "must be 2 or more: layers of this family read several streams")
    return GatedStreamsSpec(count=count, rank=keys.count("hc_lowrank"))


def _eps(keys: ConfigKeys) -> float:
    _, eps = keys.find(("hc_eps",))
    if not is_number(eps) or not 0 <= eps < 1:
        keys.refuse("hc_eps", eps, "must be a number from 0 to 1")
    return float(eps)
