"""Settings of a rotation, as config.json spells them."""

from __future__ import annotations

from typing import Any

HALF_HEAD = 8
"""Rotated pairs of a head in the small Llama (16 elements)."""
LONG_FACTORS = [1.0 + index / 2 for index in range(HALF_HEAD)]
SHORT_FACTORS = [1.0 + index / 10 for index in range(HALF_HEAD)]


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0} | parameters}


# Not a case: transformers chooses factors by the batch, so it needs tests of its own.
LONGROPE = rope("longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS, original_max_position_embeddings=32)
