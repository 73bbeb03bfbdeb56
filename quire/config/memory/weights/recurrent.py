"""The tensors of recurrent layers, a part of `shapes`."""

from __future__ import annotations

from collections import Counter

from quire.config.arch import ModelArch
from quire.config.layers.any_mixer import MixerSpec
from quire.config.layers.recurrent_mixers import (
    ConvolvedQkvSpec,
    GatedDeltaSpec,
    GateNorm,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    NGramSpec,
    RecurrentSpec,
    RgLruSpec,
    ShortConvSpec,
    StepNorms,
)
from quire.config.memory.weights.linear import Shape


def recurrent_linears(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    """Linear layers of mixers between one product in and one out, and how many there are of each."""
    assert isinstance(mixer, RecurrentSpec)
    shapes = Counter[Shape]([((mixer.in_features,), arch.hidden_size), ((arch.hidden_size,), mixer.inner_size)])
    if isinstance(mixer, MambaSpec):
        derived = mixer.time_rank + 2 * mixer.state_size
        shapes.update([((derived,), mixer.inner_size), ((mixer.inner_size,), mixer.time_rank)])
    return shapes


def linear_attention_linears(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    """As `recurrent_linears`, of linear attention."""
    assert isinstance(mixer, (GatedDeltaSpec, LightningSpec))
    shapes = Counter[Shape]([(mixer.in_parts, arch.hidden_size), ((arch.hidden_size,), mixer.inner_size)])
    if isinstance(mixer, GatedDeltaSpec) and mixer.rank is not None:
        shapes[(mixer.rank,), arch.hidden_size] += 2
        shapes.update([((mixer.inner_size,), mixer.rank), ((mixer.num_times,), mixer.rank)])
    return shapes


def rg_lru_linears(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    """As `recurrent_linears`, of an RG-LRU."""
    assert isinstance(mixer, RgLruSpec)
    shapes = Counter[Shape]({((mixer.width,), arch.hidden_size): 2})
    shapes[(arch.hidden_size,), mixer.width] += 1
    shapes[(mixer.block_size,) * 2, mixer.block_size] += mixer.num_blocks
    return shapes


def convolved_linears(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    """As `recurrent_linears`, of what gives queries, keys and values: a convolution of a head is a product."""
    assert isinstance(mixer, ConvolvedQkvSpec)
    shapes = Counter[Shape]({(mixer.in_parts, arch.hidden_size): 1})
    shapes[(mixer.head_size,), mixer.joint_width * mixer.head_size] += mixer.num_heads + mixer.num_kv_heads
    return shapes


def ngram_linears(arch: ModelArch, mixer: MixerSpec) -> Counter[Shape]:
    """Keys of all streams, and the value."""
    assert isinstance(mixer, NGramSpec)
    return Counter[Shape]([((size,), mixer.embedding_size) for size in (mixer.inner_size, mixer.stream_size)])


def num_ngram_rows(arch: ModelArch) -> int:
    """Numbers of the tables of n-grams."""
    return sum(mixer.num_rows * mixer.head_size for mixer in arch.recurrences if isinstance(mixer, NGramSpec))


def num_hash_words(arch: ModelArch) -> int:
    """Numbers of 64 bits of the hashes of n-grams, each of them counted as two."""
    return sum(_num_hash_words(mixer) for mixer in arch.recurrences if isinstance(mixer, NGramSpec))


def _num_hash_words(mixer: NGramSpec) -> int:
    return 2 * (mixer.longest + 2 * len(mixer.head_rows))


def recurrent_floats(arch: ModelArch, mixer: RecurrentSpec) -> int:
    """Numbers that are kept in float32: biases, norms, and vectors of the recurrence."""
    if isinstance(mixer, ConvolvedQkvSpec):
        floats = mixer.has_bias * mixer.in_features + mixer.num_kv_heads
        return floats + mixer.conv_channels * (mixer.single_width + 2)
    if isinstance(mixer, LightningSpec):
        return mixer.inner_size
    if isinstance(mixer, GatedDeltaSpec):
        return mixer.conv_channels * mixer.conv_width + mixer.num_value_heads + mixer.num_times + mixer.value_size
    if isinstance(mixer, NGramSpec):
        return mixer.inner_size * (3 + mixer.conv_width) + _num_hash_words(mixer)
    if isinstance(mixer, RgLruSpec):
        return mixer.width * (mixer.conv_width + 6) + arch.hidden_size
    has_out_bias = mixer.has_out_bias if isinstance(mixer, MambaSpec) else mixer.has_bias
    floats = mixer.has_bias * mixer.in_features + has_out_bias * arch.hidden_size
    floats += mixer.conv_channels * (mixer.conv_width + mixer.has_conv_bias)
    if isinstance(mixer, ShortConvSpec):
        return floats
    if isinstance(mixer, Mamba2Spec):
        return floats + 3 * mixer.num_heads + mixer.inner_size * (mixer.norm is not GateNorm.NONE)
    norms = mixer.time_rank + 2 * mixer.state_size if mixer.norms is StepNorms.WEIGHTED else 0
    return floats + mixer.inner_size * (mixer.state_size + 2) + norms
