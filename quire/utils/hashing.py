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


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block given its parent's."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()
