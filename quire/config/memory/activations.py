"""How many bytes the activations of a step take, as `ops.cpu.memory.Arena` lays them out: the first gap that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.config.arch import LayerSpec, ModelArch
from quire.config.family_spec import MlpKind, NormKind
from quire.config.layers.experts import ExpertsSpec
from quire.config.layers.mixers import (
    AttentionSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    RecurrentSpec,
    RgLruSpec,
    SharedBlock,
)
from quire.messages.kv import DTYPE_BYTES
from quire.utils.math import round_up

FLOAT = DTYPE_BYTES["float32"]
"""Bytes of a number of what recurrent layers compute between their projections."""


class _Layout:
    """Pieces of one region; a piece that ends gives its place to later ones."""

    def __init__(self, num_tokens: int, item: int) -> None:
        self._rows = round_up(num_tokens, 32) if num_tokens > 32 else num_tokens
        self.item = item
        self._pieces: dict[str, tuple[int, int]] = {}
        self.peak = 0

    def take(self, name: str, columns: int, item: int | None = None) -> None:
        """Place a piece of so many columns for each token, in the model's dtype or in items of another size."""
        self.place(name, self._rows * columns * (self.item if item is None else item))

    def place(self, name: str, num_bytes: int) -> None:
        """Place a piece in the first gap."""
        size, begin = round_up(num_bytes, 64), 0
        for start, end in sorted(self._pieces.values()):
            if start - begin >= size:
                break
            begin = end
        self._pieces[name] = begin, begin + size
        self.peak = max(self.peak, begin + size)

    def begin(self, name: str) -> int:
        """Where a piece lies."""
        return self._pieces[name][0]

    def move(self, name: str, begin: int) -> None:
        """Let a piece lie elsewhere."""
        old_begin, old_end = self._pieces[name]
        self._pieces[name] = begin, begin + old_end - old_begin

    def free(self, *names: str) -> None:
        """End pieces."""
        for name in names:
            del self._pieces[name]

    def rename(self, old: str, new: str) -> None:
        """Call a piece by another name."""
        self._pieces[new] = self._pieces.pop(old)


def activation_bytes(arch: ModelArch, dtype: str, num_tokens: int, *, ops: str) -> int:
    """Bytes of a step's activations at their most: pieces end when Python lets go of the tensors."""
    if ops != "cpu":
        return num_tokens * _reference_bytes(arch, DTYPE_BYTES[dtype])
    return _step(arch, dtype, num_tokens).peak


def step_logits_bytes(arch: ModelArch, dtype: str, num_tokens: int, num_sampled: int, *, ops: str) -> int:
    """Bytes that the logits of `num_sampled` rows take beyond `activation_bytes`, whose places they use again."""
    logits = num_sampled * arch.vocab_size * 4
    if ops != "cpu":
        return logits * (1 if arch.vocab_size % 32 == 0 else 2)
    layout = _step(arch, dtype, num_tokens)
    before = layout.peak
    layout.free("hidden")
    layout.place("sampled", num_sampled * arch.hidden_size * DTYPE_BYTES[dtype])
    layout.place("logits", logits)
    return layout.peak - before


def _step(arch: ModelArch, dtype: str, num_tokens: int) -> _Layout:
    layout = _Layout(num_tokens, DTYPE_BYTES[dtype])
    if arch.scales.embedding != 1.0:
        layout.take("rows", arch.hidden_size)
    layout.take("hidden", arch.hidden_size)
    if arch.scales.embedding != 1.0:
        layout.free("rows")
    if arch.norms.embedding is not None:
        layout.take("normed", arch.hidden_size)
        layout.free("hidden")
        layout.rename("normed", "hidden")
    if _has_shared_blocks(arch):  # which read the embeddings again
        layout.rename("hidden", "embedded")
        layout.place("hidden", 0)
    ends: dict[tuple[int, LayerSpec], int] = {}
    for layer in arch.layers:  # each meets the gaps that the one before left
        start = layout.begin("hidden"), layer
        if start in ends:
            layout.move("hidden", ends[start])
        else:
            _rule_of(arch, layer)(layout, arch, layer)
            ends[start] = layout.begin("hidden")
    layout.take("normed", arch.hidden_size)
    return layout


def _has_shared_blocks(arch: ModelArch) -> bool:
    return any(mixer.shared is not None for mixer in arch.plain_attentions)


def _rule_of(arch: ModelArch, layer: LayerSpec) -> Callable[[_Layout, ModelArch, LayerSpec], None]:
    if any(isinstance(mixer, AttentionSpec) and mixer.shared is not None for mixer in layer.mixers):
        return _shared_layer
    return _layer if arch.scales.joins is None else _joined_layer


def _shared_layer(layout: _Layout, arch: ModelArch, layer: LayerSpec) -> None:
    """A shared block, and a recurrence that reads what it adds (`models/zamba2.py`)."""
    attention, recurrence = layer.mixers
    assert isinstance(attention, AttentionSpec)
    assert isinstance(recurrence, RecurrentSpec)
    assert attention.shared is not None
    size = arch.hidden_size
    _attend_beside_embeddings(layout, arch, attention.shared)
    layout.take("renormed", size)
    layout.free("mixed")
    _feed_shared(layout, arch, attention.shared)
    layout.take("read", size)
    layout.free("fed")
    layout.take("normed", size)
    _recur(layout, arch, recurrence)
    layout.free("normed", "read", "hidden")
    layout.rename("mixed", "hidden")


def _attend_beside_embeddings(layout: _Layout, arch: ModelArch, shared: SharedBlock) -> None:
    size, heads = arch.hidden_size, arch.num_heads * arch.head_size
    parts = (heads, *(arch.num_kv_heads * arch.head_size,) * 2)
    layout.take("both", 2 * size)
    layout.take("normed", 2 * size)
    layout.free("both")
    if shared.adapts_attention:
        for index, features in enumerate(parts):
            layout.take("thin", shared.rank)
            layout.take(f"part {index}", features)
            layout.free("thin")
        layout.take("adapted", sum(parts))
        layout.free("part 0", "part 1", "part 2")
    layout.take("qkv", sum(parts))
    layout.free(*(["adapted"] if shared.adapts_attention else []))
    layout.take("query", heads)
    layout.take("attended", heads)
    layout.free("qkv", "query")
    layout.take("mixed", size)
    layout.free("attended", "normed")


def _feed_shared(layout: _Layout, arch: ModelArch, shared: SharedBlock) -> None:
    layout.take("thin", shared.rank)
    layout.take("adapted", 2 * shared.intermediate_size)
    layout.free("thin")
    layout.take("both", 2 * shared.intermediate_size)
    layout.free("adapted")
    layout.take("inner", shared.intermediate_size)
    layout.free("both")
    layout.take("fed", arch.hidden_size)
    layout.free("inner", "renormed")


def _layer(layout: _Layout, arch: ModelArch, layer: LayerSpec) -> None:
    last = "hidden"
    if layer.mixers:
        _mix(layout, arch, layer.mixers)
        last = "between"
    if layer.mlp.kind is not MlpKind.NONE:
        _feed(layout, arch, 0 if layer.mlp.experts else layer.mlp.intermediate_size)
        last = "out"
        layout.free(*(["between"] if layer.mixers else []))
    if last != "hidden":
        layout.free("hidden")
        layout.rename(last, "hidden")


def _mix(layout: _Layout, arch: ModelArch, mixers: Sequence[MixerSpec]) -> None:
    """Each mixer adds to what those before it gave."""
    norms = arch.norms
    _norm(layout, norms.input, arch.hidden_size)
    for number, mixer in enumerate(mixers):
        _mix_one(layout, arch, mixer)
        layout.free(*(["between"] if number else []))
        layout.rename("mixed", "between")
    _join(layout, arch, norms.post_attention, "between")
    if not arch.is_parallel:
        _end_norm(layout, norms.input)


def _feed(layout: _Layout, arch: ModelArch, inner: int) -> None:
    size, norms = arch.hidden_size, arch.norms
    if arch.is_parallel and norms.pre_mlp is not None:
        layout.take("renormed", size)
        _end_norm(layout, norms.input)
        layout.rename("renormed", "normed")
    elif not arch.is_parallel:
        _norm(layout, norms.pre_mlp, size)
    layout.take("inner", inner)
    layout.take("out", size)
    layout.free("inner")
    _join(layout, arch, norms.post_mlp, "out")
    _end_norm(layout, norms.input if arch.is_parallel and norms.pre_mlp is None else norms.pre_mlp)


def _joined_layer(layout: _Layout, arch: ModelArch, layer: LayerSpec) -> None:
    """Of a family with `Joins`: each half adds to what it reads."""
    size = arch.hidden_size
    layout.take("normed", size)
    _mix_one(layout, arch, layer.mixers[0])
    _join_normed(layout, size, "mixed")
    layout.take("renormed", size)
    layout.free("normed", "mixed")
    layout.rename("renormed", "normed")
    layout.take("inner", 0 if layer.mlp.experts else layer.mlp.intermediate_size)
    layout.take("out", size)
    layout.free("inner")
    _join_normed(layout, size, "out")
    layout.free("normed", "hidden")
    layout.rename("out", "hidden")


def _join_normed(layout: _Layout, size: int, piece: str) -> None:
    layout.take("kept", size)
    layout.take("joined", size)
    layout.free(piece, "kept")
    layout.rename("joined", piece)


def _mix_one(layout: _Layout, arch: ModelArch, mixer: MixerSpec) -> None:
    if isinstance(mixer, RecurrentSpec):
        _recur(layout, arch, mixer)
    else:
        _attend(layout, arch, mixer)


def _attend(layout: _Layout, arch: ModelArch, mixer: AttentionSpec | LatentAttentionSpec) -> None:
    heads, keys_values = arch.num_heads * arch.head_size, 2 * arch.num_kv_heads * arch.head_size
    is_latent, has_experts = isinstance(mixer, LatentAttentionSpec), _has_experts(mixer)
    if isinstance(mixer, LatentAttentionSpec):
        _compress(layout, arch, mixer)
    elif has_experts:
        layout.take("keys and values", keys_values)
    layout.take("qkv", heads + keys_values)
    layout.free(*(["projected", "compressed"] if is_latent else ["keys and values"] if has_experts else []))
    layout.take("query", heads)
    layout.take("attended", heads)
    layout.free("qkv", "query")
    if isinstance(mixer, LatentAttentionSpec):
        _expand(layout, arch, mixer)
    elif mixer.is_gated:
        layout.take("gate", heads)
        layout.free("gate")
    layout.take("mixed", arch.hidden_size)
    layout.free("attended")


def _has_experts(mixer: AttentionSpec | LatentAttentionSpec) -> bool:
    return isinstance(mixer, AttentionSpec) and mixer.experts is not None


def _compress(layout: _Layout, arch: ModelArch, mixer: LatentAttentionSpec) -> None:
    """Queries and latents, as `latent_qkv` reads them."""
    if mixer.query_rank is not None:
        layout.take("down", mixer.query_rank)
        layout.take("down normed", mixer.query_rank)
        layout.free("down")
    layout.take("projected", arch.num_heads * (mixer.nope_size + mixer.rope_size))
    if mixer.query_rank is not None:
        layout.free("down normed")
    layout.take("compressed", mixer.latent_size + mixer.rope_size)


def _expand(layout: _Layout, arch: ModelArch, mixer: LatentAttentionSpec) -> None:
    """The values of what was attended to, by `latent_values`."""
    layout.take("values", arch.num_heads * mixer.value_size)
    layout.free("attended")
    layout.rename("values", "attended")


def _recur(layout: _Layout, arch: ModelArch, mixer: RecurrentSpec) -> None:
    parts = (mixer.width, mixer.width) if isinstance(mixer, RgLruSpec) else (mixer.in_features,)
    pieces = [f"projected {index}" for index in range(len(parts))]
    for piece, columns in zip(pieces, parts, strict=True):
        layout.take(piece, columns)
    if isinstance(mixer, MambaSpec):
        _derive(layout, mixer)
        layout.take("scanned", mixer.inner_size)
        layout.free("convolved", "derived", "wide")
    elif isinstance(mixer, RgLruSpec):
        _open(layout, mixer)
        layout.take("scanned", mixer.inner_size)
        layout.free("convolved", "gates")
    elif isinstance(mixer, Mamba2Spec | GatedDeltaSpec | LightningSpec):
        layout.take("convolved", mixer.inner_size if isinstance(mixer, LightningSpec) else mixer.conv_channels, FLOAT)
        layout.take("scanned", mixer.inner_size)
        layout.free("convolved")
    else:
        layout.take("scanned", mixer.inner_size)
    layout.free(*pieces)
    layout.take("mixed", arch.hidden_size)
    layout.free("scanned")


def _derive(layout: _Layout, mixer: MambaSpec) -> None:
    """What Mamba's scan reads beside the projection, all of it in float32."""
    layout.take("convolved", mixer.inner_size, FLOAT)
    if layout.item != FLOAT:
        layout.take("rounded", mixer.inner_size)
    layout.take("derived", mixer.time_rank + 2 * mixer.state_size, FLOAT)
    if layout.item != FLOAT:
        layout.free("rounded")
    layout.take("time", mixer.time_rank)
    layout.take("wide", mixer.inner_size, FLOAT)
    layout.free("time")


def _open(layout: _Layout, mixer: RgLruSpec) -> None:
    """The gates of an RG-LRU, and the convolution that they and the scan read."""
    layout.take("convolved", mixer.width, FLOAT)
    layout.take("by block", mixer.width)
    layout.take("gates", 2 * mixer.width, FLOAT)
    layout.free("by block")


def _norm(layout: _Layout, name: str | None, size: int) -> None:
    if name is not None:
        layout.take("normed", size)


def _end_norm(layout: _Layout, name: str | None) -> None:
    if name is not None:
        layout.free("normed")


def _join(layout: _Layout, arch: ModelArch, norm: str | None, piece: str) -> None:
    """What a part gives is normed, scaled and added to the residual; without norm or scale its product adds it."""
    is_scaled = arch.scales.residual != 1.0
    for _ in range((norm is not None) + (is_scaled or (norm is not None and arch.norms.kind is NormKind.LAYER))):
        layout.take("joined", arch.hidden_size)
        layout.free(piece)
        layout.rename("joined", piece)


def _reference_bytes(arch: ModelArch, item: int) -> int:
    """Bytes for each token: the reference computes in float32 and rounds what it returns."""
    size, heads = arch.hidden_size, arch.num_heads * arch.head_size
    recurrent = max(
        (
            item * (2 * size + mixer.in_features + mixer.inner_size) + 4 * mixer.in_features
            for mixer in arch.recurrences
        ),
        default=0,
    )
    latent = max((_reference_latent_bytes(arch, item, mixer) for mixer in _latent_mixers(arch)), default=0)
    qkv = heads + 2 * arch.num_kv_heads * arch.head_size
    beside = item * size * any(len(layer.mixers) > 1 for layer in arch.layers)
    more = size * (arch.is_parallel or arch.norms.post_mlp is not None or arch.scales.residual != 1.0)
    more += 2 * size * (arch.scales.joins is not None)
    inner = arch.widest_mlp
    attention = item * (2 * size + qkv + 2 * heads) + 4 * (qkv + 2 * heads)
    mlp = item * (4 * size + more + inner) + 4 * (size + 4 * inner)
    return max(beside + max(attention, recurrent, latent), mlp)


def _latent_mixers(arch: ModelArch) -> set[LatentAttentionSpec]:
    return {mixer for mixer in arch.attentions if isinstance(mixer, LatentAttentionSpec)}


def _reference_latent_bytes(arch: ModelArch, item: int, mixer: LatentAttentionSpec) -> int:
    """While queries are taken to the latents, or values from them; the products of all heads stand there twice."""
    heads, size, latent = arch.num_heads, 2 * arch.hidden_size, mixer.latent_size
    before = heads * (2 * mixer.nope_size + mixer.rope_size + latent) + 4 * latent + 2 * mixer.rope_size
    joined = max(heads * latent, (heads + 2) * arch.head_size)
    behind = heads * (arch.head_size + latent + 2 * mixer.value_size)
    return item * (size + max(before + joined, behind)) + 12 * max(latent, mixer.nope_size, mixer.value_size)


def experts_bytes(arch: ModelArch, dtype: str, num_tokens: int) -> int:
    """Bytes that a mixture of experts works with beside the activations, if one expert gets every token of the step and
    ops call each expert by itself."""
    mixtures = (_one_by_one_bytes(arch, experts, dtype, num_tokens) for experts in arch.mixtures)
    return max(*mixtures, attention_experts_bytes(arch, dtype, num_tokens), 0)


def attention_experts_bytes(arch: ModelArch, dtype: str, num_tokens: int) -> int:
    """As `experts_bytes`, of experts that give queries and outputs.

    Their sum and an expert's output in float32, the rows and heads of an expert; the router's input, logits and order,
    and who chose the expert.
    """
    counts = [mixer.experts.num_experts for mixer in arch.plain_attentions if mixer.experts is not None]
    if not counts:
        return 0
    item, size, inner = DTYPE_BYTES[dtype], arch.hidden_size, arch.num_kv_heads * arch.head_size
    return num_tokens * (size * (8 + item) + 2 * inner * item + 33 * max(counts) + 48 * arch.num_heads)


def _one_by_one_bytes(arch: ModelArch, experts: ExpertsSpec, dtype: str, num_tokens: int) -> int:
    """The sum in float32, the rows of an expert, their inner features and its output in float32; the router's input,
    logits and order, and the choice. A clamped gate also has both its inputs, and its output, in float32."""
    item, size = DTYPE_BYTES[dtype], arch.hidden_size
    inner = max(experts.size, experts.shared_size) * (item if experts.gate is None else item + 12)
    return num_tokens * (size * (8 + item) + inner + experts.num_experts * 32 + experts.routing.num_chosen * 48)


WAVE_BYTES = 16 << 20
"""What a wave of experts works with, unless one batch takes more (`kWaveBytes` in csrc/cpu/experts.cpp)."""
BATCH_ROWS = 512
"""Rows of an expert that a wave takes at most (`kMostRows` there)."""
JOB_BYTES = 2048
"""What describes a batch: two products and where their rows lie, each in whole cache lines."""


def native_experts_bytes(arch: ModelArch, dtype: str, num_tokens: int) -> int:
    """As `experts_bytes`, of the native op."""
    mixtures = (_native_bytes(arch, experts, dtype, num_tokens) for experts in arch.mixtures)
    return max(*mixtures, attention_experts_bytes(arch, dtype, num_tokens), 0)


def _native_bytes(arch: ModelArch, experts: ExpertsSpec, dtype: str, num_tokens: int) -> int:
    """Its two pieces of scratch, which are kept from step to step."""
    return _kept(_routed_bytes(arch, experts, num_tokens)) + _kept(_wave_bytes(arch, experts, dtype, num_tokens))


def _kept(num_bytes: int) -> int:
    """Scratch takes a quarter more than it is asked for, in whole huge pages (`scratch` in csrc/cpu/threads.cpp)."""
    return round_up(num_bytes + num_bytes // 4, 2 << 20)


def _routed_bytes(arch: ModelArch, experts: ExpertsSpec, num_tokens: int) -> int:
    """Logits, choices with their weights and places, and the sum in float32."""
    choices = experts.routing.num_chosen + (experts.shared_size > 0)
    of_token = 4 * (experts.num_experts + 1 + arch.hidden_size) + 20 * choices
    return num_tokens * of_token + 32 * experts.num_experts + num_tokens * choices // BATCH_ROWS * 24 + 4096


def _wave_bytes(arch: ModelArch, experts: ExpertsSpec, dtype: str, num_tokens: int) -> int:
    """One row takes most where it is alone: quantised inputs are laid out for 16 rows. Sums before a gate are kept
    where a product does not end with it, and inputs that are weighed.
    """
    choices, widest = experts.routing.num_chosen + 1, max(experts.size, experts.shared_size)
    item, has_sums = DTYPE_BYTES[dtype], experts.gate is not None or not experts.is_gated or widest % 32 > 0
    row = 4 * arch.hidden_size + (item + 8 * has_sums) * widest + item * experts.routing.weighs_input * arch.hidden_size
    depth = round_up(arch.hidden_size, 64) + round_up(widest, 64)
    batch = round_up(min(num_tokens, BATCH_ROWS), 32) * (row + 4 * depth) + JOB_BYTES
    all_alone = num_tokens * choices * (row + 17 * depth + JOB_BYTES)
    return min(max(WAVE_BYTES, batch), all_alone)


STATES_AT_ONCE = 4 << 20
"""Bytes of states that a scan works with at a time, unless a single one has more."""
STATE_COPIES = 4
"""Tensors of their size: the states, their decay, what is added to them, and what is read of them."""


def recurrence_bytes(arch: ModelArch, num_tokens: int, num_seqs: int, *, ops: str) -> int:
    """Bytes that a recurrent layer works with beside the activations, in float32, where torch computes it."""
    if ops == "cpu":
        return 0
    return max((_recurrence_bytes(mixer, num_tokens, num_seqs) for mixer in arch.recurrences), default=0)


def _recurrence_bytes(mixer: RecurrentSpec, num_tokens: int, num_seqs: int) -> int:
    inner = mixer.inner_size
    states = STATE_COPIES * max(STATES_AT_ONCE, 4 * inner * mixer.state_size)
    if isinstance(mixer, LightningSpec):  # query, key and value of each channel, and no convolution
        return 4 * num_tokens * 14 * (inner + 64) + states
    channels = mixer.conv_channels
    if isinstance(mixer, Mamba2Spec):
        derived = 2 * mixer.num_heads
    elif isinstance(mixer, GatedDeltaSpec):
        derived = 6 * mixer.num_value_heads
    else:
        derived = (8 if isinstance(mixer, RgLruSpec) else 3) * inner
    convolved = (num_tokens + num_seqs * mixer.conv_width) * channels + 4 * num_tokens * round_up(channels + 32, 32)
    scanned = num_tokens * (6 * (inner + 64) + derived)
    return 4 * (convolved + scanned) + states


CHANNELS_AT_ONCE = 64
"""Whose states one piece of a native scan takes where each channel decays by itself; `kScanChannels` in csrc."""
TOKENS_AT_ONCE = 16
"""Whose vectors a piece has at hand; `kStepTokens` in csrc."""


def scan_scratch_bytes(arch: ModelArch) -> int:
    """Bytes that one thread of a native scan works with: a copy of the state that its piece takes, where that lies in
    both halves of a page, and the vectors by which some tokens read and write it."""
    return max((_piece_bytes(mixer) for mixer in arch.recurrences), default=0)


def _piece_bytes(mixer: RecurrentSpec) -> int:
    if isinstance(mixer, Mamba2Spec):
        return FLOAT * mixer.head_size * mixer.state_size
    if isinstance(mixer, GatedDeltaSpec):
        return FLOAT * (mixer.value_size + 2 * TOKENS_AT_ONCE) * mixer.key_size
    if isinstance(mixer, LightningSpec):
        return FLOAT * (mixer.head_size + 3 * TOKENS_AT_ONCE) * mixer.head_size
    return FLOAT * min(CHANNELS_AT_ONCE, mixer.inner_size) * mixer.state_size
