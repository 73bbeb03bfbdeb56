"""How many bytes a model takes that transformers builds, from its headers.

Weights are as many numbers as the files hold. What a step takes beside them depends on code that quire does not know,
so these are bounds for the forms that decoders have: `tests/executor/test_measured_fallback.py` compares.
"""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.memory.weights.stored import StoredWeights
from quire.messages.kv import DTYPE_BYTES

HEAD_COPIES = 6
"""Queries, keys and values as projected, in two steps of their rotation, side by side for the cache, and behind it."""
HIDDEN_COPIES = 4
"""The residual, its norm, and what attention or MLP add to it."""
FLOAT_COPIES = 4
"""Of a hidden state, in float32, inside a norm."""
INNER_COPIES = 5
"""Gate, up, the activation, their product, and one more."""
READERS = 4
"""Threads of transformers that read weights, each of which holds one tensor."""
EXPERT_ENTRIES = 16
"""Numbers of 8 bytes that routing keeps for each token and expert: scores, order, masks."""


def stored_weight_bytes(stored: StoredWeights, dtype: str) -> int:
    """Bytes of the weights once loaded. A head that the file holds beside the table it is tied to is counted, too."""
    return stored.num_parameters * DTYPE_BYTES[dtype]


def stored_loading_bytes(arch: ModelArch, stored: StoredWeights, dtype: str) -> int:
    """Bytes that reading takes beyond the weights: tensors as stored, pages of the file, and the experts of a layer
    while they are joined.
    """
    return (READERS + 1) * stored.largest * DTYPE_BYTES[arch.dtype] + stored.largest_joined * DTYPE_BYTES[dtype]


def stored_activation_bytes(arch: ModelArch, stored: StoredWeights, dtype: str, num_tokens: int) -> int:
    """Bytes of a step's activations at the most, and of the largest weight as torch may lay it out for a product."""
    item, size = DTYPE_BYTES[dtype], arch.hidden_size
    heads = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size
    attention = item * (HIDDEN_COPIES * size + HEAD_COPIES * heads) + 4 * heads
    mlp = item * (HIDDEN_COPIES * size + INNER_COPIES * stored.widest) + 4 * stored.widest
    routing = 8 * EXPERT_ENTRIES * stored.num_experts if stored.num_experts > 1 else 0
    return num_tokens * (max(attention, mlp + routing) + 4 * FLOAT_COPIES * size) + 4 * stored.largest


def stored_logits_bytes(arch: ModelArch, dtype: str, num_rows: int) -> int:
    """Bytes of logits while they are computed: in the model's dtype, scaled or capped, and in float32."""
    return num_rows * (arch.vocab_size * (2 * DTYPE_BYTES[dtype] + 4) + arch.hidden_size * DTYPE_BYTES[dtype])
