"""Chained content hashes of KV blocks.

A block's hash covers everything before it, so equal hashes mean equal prefixes. The index that uses them compares the
tokens as well: a collision costs a cache miss, never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b"quire-kv-block-1"


def root_hash(engine_digest: bytes, salt: str | None) -> bytes:
    """The parent of a first block; different engines, or requests with different salts, never share blocks.

    All engine digests have the same length.
    """
    return blake2b(engine_digest + (salt or "").encode(), digest_size=16, key=ROOT).digest()


def block_hashes(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The hashes of the full blocks in a row of tokens, given that of the block before them."""
    data, size = memoryview(array("q", token_ids)).cast("B"), 8 * block_size
    hashes = []
    for first in range(0, len(data) - size + 1, size):
        parent = blake2b(data[first : first + size], digest_size=16, key=parent).digest()
        hashes.append(parent)
    return hashes
