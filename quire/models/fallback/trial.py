"""A few tokens through a model before anybody else's: does it compute over pages what it computes at once?

The classes of transformers are not asked what they do; they are watched. What a layer learns of other tokens without
the attention interface (from a state, a convolution, a shift of tokens) is lost between two steps, and shows here.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from quire.attention.context import ForwardContext, GroupContext
from quire.config.arch import ModelArch
from quire.errors import ConfigError
from quire.models.fallback.attention import Seen
from quire.models.fallback.model import TransformersModel
from quire.ops.contracts.operands import AttentionMetadata
from quire.ops.contracts.ops import Ops

NUM_TOKENS = 8
BLOCK_SIZE = 16
LARGEST_ERROR = 0.1
"""Of the median token, relative to its hidden state. Rounding to 16 bits makes some 0.01, a lost state some 1."""


def try_model(model: TransformersModel, arch: ModelArch, dtype: torch.dtype, *, max_model_len: int) -> None:
    """Run a prompt at once and token by token. Mutates: the windows of the model's attention.

    Raises: ConfigError saying what the model does that does not work over a paged cache.
    """
    caches = [_cache(model.attention.ops, arch, dtype) for _ in range(arch.num_layers)]
    token_ids = torch.arange(NUM_TOKENS) % arch.vocab_size
    seen = _watch(model, arch, token_ids, _context(caches, 0, NUM_TOKENS))
    _check_layers(arch, seen)
    _set_windows(model, arch, seen, max_model_len)
    at_once = model.forward(token_ids, _context(caches, 0, NUM_TOKENS))
    one_by_one = [model.forward(token_ids[k : k + 1], _context(caches, k, k + 1)) for k in range(NUM_TOKENS)]
    _compare(arch, at_once, torch.cat(one_by_one))
    _check_logits(arch, model.compute_logits(at_once[-1:]))


def _watch(model: TransformersModel, arch: ModelArch, token_ids: Tensor, context: ForwardContext) -> Seen:
    """What the layers ask of attention. Raises: ConfigError where that is refused, or the model fails."""
    model.attention.seen = seen = Seen()
    try:
        model.forward(token_ids, context)
    except ConfigError as error:
        _refuse(arch, error.message)
    except Exception as error:  # whatever foreign code raises means the same here
        _check_heads(arch, seen)
        _refuse(arch, f"it fails ({type(error).__name__}: {' '.join(str(error).split())[:300]})", error)
    finally:
        model.attention.seen = None
    return seen


def _check_layers(arch: ModelArch, seen: Seen) -> None:
    """Every layer attends once, with the heads that are planned."""
    if seen.num_calls != dict.fromkeys(range(arch.num_layers), 1):
        counts = ", ".join(f"{count} in layer {layer}" for layer, count in sorted(seen.num_calls.items())) or "none"
        _refuse(arch, f"its {arch.num_layers} layers do not attend once each (calls of attention: {counts[:300]})")
    _check_heads(arch, seen)


def _check_heads(arch: ModelArch, seen: Seen) -> None:
    for layer, (kv_heads, size) in seen.shapes.items():
        if (kv_heads, size) != (arch.num_kv_heads, arch.head_size):
            planned = f"{arch.num_kv_heads} of {arch.head_size}"
            _refuse(arch, f"layer {layer} has {kv_heads} KV heads of {size} numbers, where {planned} are planned")


def _set_windows(model: TransformersModel, arch: ModelArch, seen: Seen, max_model_len: int) -> None:
    """The windows of the masks, which may be smaller than those that pages are kept for."""
    for layer, mask in seen.masks.items():
        planned = arch.attentions[layer].window
        try:
            window = None if mask is None else mask.window(max_model_len)
        except ConfigError as error:
            _refuse(arch, error.message)
        if planned is not None and planned < max_model_len and (window is None or window > planned):
            _refuse(arch, f"layer {layer} sees {window or 'all'} tokens, where {planned} are planned")
        model.attention.windows[layer] = window


def _compare(arch: ModelArch, at_once: Tensor, one_by_one: Tensor) -> None:
    lengths = at_once.float().norm(dim=1).clamp_min(1e-9)  # a token of padding may have none
    error = ((at_once - one_by_one).float().norm(dim=1) / lengths).median().item()
    if not error < LARGEST_ERROR:
        _refuse(
            arch,
            f"a prompt gives other results token by token than at once (by {error:.0%}): its layers learn of earlier "
            "tokens by other means than attention, or do not see them in order",
        )


def _check_logits(arch: ModelArch, logits: Tensor) -> None:
    if logits.shape != (1, arch.vocab_size):
        _refuse(arch, f"it gives {logits.shape[-1]} logits for a vocabulary of {arch.vocab_size}")


def _refuse(arch: ModelArch, reason: str, error: Exception | None = None) -> NoReturn:
    raise ConfigError(f"{arch.source}: quire cannot run {arch.architecture} through transformers: {reason}.") from error


def _cache(ops: Ops, arch: ModelArch, dtype: torch.dtype) -> Tensor:
    """One page."""
    return ops.allocate_kv_cache(
        num_blocks=1,
        block_size=BLOCK_SIZE,
        num_kv_heads=arch.num_kv_heads,
        head_size=arch.head_size,
        dtype=dtype,
    )


def _context(caches: list[Tensor], first: int, end: int) -> ForwardContext:
    """A step of one sequence, whose tokens first .. end are computed."""
    positions = torch.arange(first, end)
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, end - first], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        block_size=BLOCK_SIZE,
    )
    return ForwardContext(
        positions=positions,
        groups=[GroupContext(slot_mapping=positions, attention=metadata)],
        group_of_layer=dict.fromkeys(range(len(caches)), 0),
        kv_caches=caches,
    )
