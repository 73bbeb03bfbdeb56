"""How many bytes experts and recurrences work with beside the activations of a step."""

from __future__ import annotations

import math

from quire.config.arch import ModelArch
from quire.config.layers.experts import ExpertsSpec
from quire.config.layers.layer_kinds import Heads
from quire.config.layers.mixers import BlockIndexerSpec, CompressedAttentionSpec, MeanIndexerSpec
from quire.config.layers.recurrent_mixers import (
    ConvolvedQkvSpec,
    GatedDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    NGramSpec,
    RecurrentSpec,
    RgLruSpec,
)
from quire.config.memory.activations.layout import FLOAT
from quire.config.memory.weights.shapes import compressions, indexers
from quire.messages.kv import DTYPE_BYTES
from quire.utils.math import cdiv, round_up


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
    inner = experts.widest * (item if experts.gate is None else item + 12)
    return num_tokens * (size * (8 + item) + inner + experts.num_candidates * 32 + experts.routing.num_chosen * 48)


WAVE_BYTES = 16 << 20
"""What a wave of experts works with, unless one batch takes more (`kWaveBytes` in csrc/cpu/products/experts.cpp)."""
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
    """Scratch takes a quarter more than it is asked for, in whole huge pages (`scratch` in csrc/cpu/runtime/)."""
    return round_up(num_bytes + num_bytes // 4, 2 << 20)


def _routed_bytes(arch: ModelArch, experts: ExpertsSpec, num_tokens: int) -> int:
    """Logits, choices with their weights and places, and the sum in float32."""
    choices = experts.routing.num_chosen + (experts.shared_size > 0 and not experts.has_mlp_beside)
    of_token = 4 * (experts.num_candidates + 1 + arch.hidden_size) + 20 * choices
    return num_tokens * of_token + 32 * experts.num_candidates + num_tokens * choices // BATCH_ROWS * 24 + 4096


def _wave_bytes(arch: ModelArch, experts: ExpertsSpec, dtype: str, num_tokens: int) -> int:
    """One row takes most where it is alone: quantised inputs are laid out for 16 rows. Sums before a gate are kept
    where a product does not end with it, and inputs that are weighed.
    """
    choices, widest = experts.routing.num_chosen + 1, experts.widest
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


IN_TORCH = (ConvolvedQkvSpec, NGramSpec)
"""Those that torch computes on CPUs, too."""


def recurrence_bytes(arch: ModelArch, num_tokens: int, num_seqs: int, *, ops: str) -> int:
    """Bytes that a recurrent layer works with beside the activations, in float32, where torch computes it."""
    found = {mixer for mixer in arch.recurrences if ops != "cpu" or isinstance(mixer, IN_TORCH)}
    return max((_recurrence_bytes(mixer, num_tokens, num_seqs) for mixer in found), default=0)


def _recurrence_bytes(mixer: RecurrentSpec, num_tokens: int, num_seqs: int) -> int:
    if isinstance(mixer, NGramSpec):
        return _ngram_bytes(mixer, num_tokens, num_seqs)
    inner = mixer.inner_size
    states = STATE_COPIES * max(STATES_AT_ONCE, 4 * inner * mixer.state_size)
    if isinstance(mixer, LightningSpec):  # query, key and value of each channel, and no convolution
        return 4 * num_tokens * 14 * (inner + 64) + states
    channels = mixer.conv_channels
    if isinstance(mixer, ConvolvedQkvSpec):  # inputs, a convolution, and its terms
        return 4 * (4 * num_tokens + 2 * num_seqs * mixer.conv_width) * (channels + inner)
    if isinstance(mixer, Mamba2Spec):
        derived = 2 * mixer.num_heads
    elif isinstance(mixer, GatedDeltaSpec):
        derived = 3 * (mixer.num_value_heads + mixer.num_times)
    else:
        derived = (8 if isinstance(mixer, RgLruSpec) else 3) * inner
    convolved = (num_tokens + num_seqs * mixer.conv_width) * channels + 4 * num_tokens * round_up(channels + 32, 32)
    scanned = num_tokens * (6 * (inner + 64) + derived)
    return 4 * (convolved + scanned) + states


def _ngram_bytes(mixer: NGramSpec, num_tokens: int, num_seqs: int) -> int:
    """Hashes of all heads, a few times, and the tokens that they are of; the inputs of a convolution, those of a few
    tokens at a time, beside those before them."""
    hashes = num_tokens * (5 * len(mixer.head_rows) + 16) * 8 + num_seqs * mixer.longest * 64
    return max(hashes, (3 * mixer.num_past + 8 * STREAM_ROWS) * (mixer.conv_channels + 64) * FLOAT)


SELECTION_BYTES = 8 << 20
"""What the scores, or the gathered pages, of the tokens of a wave take, unless one token's take more (`kWaveBytes` in
csrc/cpu/attention/steps.h)."""


def selection_bytes(arch: ModelArch, num_tokens: int, max_model_len: int, block_bytes: int, block_size: int) -> int:
    """Bytes that the native ops of an indexer work with beside the activations; a block's are those of one layer."""
    found = {indexer.num_selected for indexer in indexers(arch) if indexer.num_selected < max_model_len}
    found |= {spec.num_tokens for spec in mean_indexers(arch) if spec.num_tokens < max_model_len}
    if not found:
        return 0
    of_token = (round_up(max_model_len, block_size) * FLOAT, cdiv(max(found), block_size) * block_bytes)
    return _kept(max(each * min(num_tokens, max(1, SELECTION_BYTES // each)) for each in of_token))


COMPRESSED_BYTES = 8 << 20
"""What compressed attention works with at a time, unless one token or entry takes more (`WAVE_BYTES` in
ops/shared/compressed.py)."""
SPLIT, TILE = 128, 16
"""Rows of the context, and heads of queries, in whole numbers of which it computes (there)."""
SCORED_AT_A_TIME = 8
"""Tokens whose blocks are scored together (there)."""
STREAM_ROWS = 32
"""Tokens whose streams are read or written at a time (`ROWS_AT_A_TIME` in ops/shared/hyper.py)."""


def block_selection_bytes(arch: ModelArch, dtype: str, num_tokens: int, max_model_len: int, page_tokens: int) -> int:
    """Bytes that the ops of an indexer of blocks work with beside the activations, native or the reference
    (`ops/shared/block_selection.py`).
    """
    found = {(mixer.blocks, mixer.heads) for mixer in arch.plain_attentions if mixer.blocks is not None}
    found = {each for each in found if max_model_len > each[0].num_selected * each[0].block_size}
    scored = [_scored_bytes(spec, max_model_len) for spec, _ in found]
    scored += [_wave_bytes_of_scores(spec, num_tokens, max_model_len) for spec, _ in found]
    listed = [num_tokens * _listed_bytes(*each, DTYPE_BYTES[dtype], page_tokens) for each in found]
    return max((*scored, *listed), default=0)


def _scored_bytes(spec: BlockIndexerSpec, max_model_len: int) -> int:
    """Keys of a context, the products of a token, and scores of blocks."""
    rows = round_up(spec.num_heads, TILE)
    whole = math.lcm(SPLIT, spec.block_size)
    of_key = 3 * FLOAT * (spec.head_size + 2 * rows)
    keys = min(round_up(max_model_len, whole), whole * max(1, COMPRESSED_BYTES // (of_key * whole)))
    return keys * of_key + SCORED_AT_A_TIME * FLOAT * spec.num_heads * cdiv(max_model_len, spec.block_size)


def _wave_bytes_of_scores(spec: BlockIndexerSpec, num_tokens: int, max_model_len: int) -> int:
    """Of the native op: scores of as many tokens as a wave takes (`SELECTION_BYTES`)."""
    of_token = FLOAT * spec.num_heads * cdiv(max_model_len, spec.block_size)
    return _kept(of_token * min(num_tokens, max(1, SELECTION_BYTES // of_token)))


def _listed_bytes(spec: BlockIndexerSpec, heads: Heads, item: int, page_tokens: int) -> int:
    """Numbers of the pages that a token attends to, a few times; queries of a KV head, and what they attended to."""
    return 32 * spec.num_selected * spec.block_size // page_tokens + 2 * item * heads.query_size // heads.num_kv_heads


def compressed_bytes(arch: ModelArch, num_tokens: int, max_model_len: int) -> int:
    """Bytes that the ops of compressed attention, or of streams, work with beside the activations."""
    attention = [_compressed_bytes(mixer, num_tokens, max_model_len) for mixer in compressions(arch)]
    attention += [_mean_bytes(spec, num_tokens, max_model_len) for spec in mean_indexers(arch)]
    count = max((spec.count for spec in (arch.hyper, arch.gated_streams) if spec is not None), default=0)
    return max(*attention, 6 * FLOAT * min(num_tokens, STREAM_ROWS) * count * arch.hidden_size, 0)


def mean_indexers(arch: ModelArch) -> set[MeanIndexerSpec]:
    """Those of the layers, each once."""
    return {mixer.means for mixer in arch.plain_attentions if mixer.means is not None}


def _mean_bytes(spec: MeanIndexerSpec, num_tokens: int, max_model_len: int) -> int:
    """Keys of the tokens of some entries; scores of a token's entries; positions that are chosen, a few times."""
    entries = max_model_len // spec.rate
    of_entry = 12 * FLOAT * spec.rate * spec.head_size
    made = _at_a_time(of_entry, cdiv(num_tokens, spec.rate) + 1)
    listed = 16 * num_tokens * spec.num_tokens
    return max(made, _scores_bytes(spec.head_size, spec.num_heads, entries)) + listed


def _scores_bytes(row_size: int, num_heads: int, entries: int) -> int:
    """Keys and products of some entries of a token's context, and the scores of all."""
    of_split = 3 * FLOAT * SPLIT * (row_size + 2 * round_up(num_heads, TILE))
    return _at_a_time(of_split, cdiv(entries, SPLIT)) + entries * 16 * FLOAT


def _compressed_bytes(mixer: CompressedAttentionSpec, num_tokens: int, max_model_len: int) -> int:
    """Contexts of some tokens; products and gates of the tokens of some entries; or scores of a token's entries."""
    spec, heads = mixer.compressor, round_up(mixer.num_heads, TILE)
    parts = (mixer.head_size,) if spec is None else spec.parts(mixer.head_size)
    entries = 0 if spec is None else max_model_len // spec.rate
    seen = entries if spec is None or spec.indexer is None else min(entries, spec.indexer.num_selected)
    row = FLOAT * (4 * sum(parts) + 2 * heads + 3 * heads * mixer.head_size // SPLIT)
    sizes = [_at_a_time((round_up(mixer.window, SPLIT) + round_up(seen, SPLIT)) * row, num_tokens)]
    if spec is not None:
        of_entry = 12 * FLOAT * spec.reach * spec.num_products * sum(parts)
        sizes.append(_at_a_time(of_entry, cdiv(num_tokens, spec.rate) + 1))
    if spec is not None and spec.indexer is not None:
        sizes.append(_scores_bytes(sum(parts), spec.indexer.num_heads, entries))
    return max(sizes)


def _at_a_time(num_bytes: int, count: int) -> int:
    """Of so many things of as many bytes each."""
    return num_bytes * min(count, max(1, COMPRESSED_BYTES // num_bytes))


CHANNELS_AT_ONCE = 64
"""Whose states one piece of a native scan takes where each channel decays by itself; `kScanChannels` in csrc."""
TOKENS_AT_ONCE = 16
"""Whose vectors a piece has at hand; `kStepTokens` in csrc."""


def scan_scratch_bytes(arch: ModelArch) -> int:
    """Bytes that one thread of a native scan works with: a copy of the state that its piece takes, where that lies in
    both halves of a page, and the vectors by which some tokens read and write it."""
    return max((_piece_bytes(mixer) for mixer in arch.recurrences), default=0)


def _piece_bytes(mixer: RecurrentSpec) -> int:
    if isinstance(mixer, NGramSpec):
        return 0
    if isinstance(mixer, Mamba2Spec):
        return FLOAT * mixer.head_size * mixer.state_size
    if isinstance(mixer, GatedDeltaSpec):
        return FLOAT * (mixer.value_size + (2 + mixer.by_channel) * TOKENS_AT_ONCE) * mixer.key_size
    if isinstance(mixer, LightningSpec):
        return FLOAT * (mixer.head_size + 3 * TOKENS_AT_ONCE) * mixer.head_size
    return FLOAT * min(CHANNELS_AT_ONCE, mixer.inner_size) * mixer.state_size
