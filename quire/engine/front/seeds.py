"""Seeds for requests that bring none.

Offline the same program gets the same seeds in every run. A server's requests are new ones: no two of them share a
seed, whichever front they reach and whenever it was started.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b

from quire.config.engine import ModelConfig

SEED_BITS = 63
MakeSeeds = Callable[[ModelConfig], Iterator[int]]


def same_seeds(model: ModelConfig) -> Iterator[int]:
    """Seeds that are a function of the engine's seed and of how many were drawn before: for one program at a time."""
    return _counted(str(model.seed))


def new_seeds(model: ModelConfig, front: int = 0) -> Iterator[int]:
    """Seeds for a server's front: from the system, or from the engine's seed if the operator gave one.

    `front` is a number that no other front of the server has or had. With a given seed, the first front draws as
    `same_seeds` does, and others from sequences of their own.
    """
    if model.seed_is_given:
        return _counted(f"{model.seed}/{front}" if front else str(model.seed))
    return map(secrets.randbits, itertools.repeat(SEED_BITS))


def seeds_of_front(front: int) -> MakeSeeds:
    """`new_seeds` for one front."""
    return partial(new_seeds, front=front)


def _counted(base: str) -> Iterator[int]:
    return (_seed(f"{base}/{ordinal}") for ordinal in itertools.count())


def _seed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> (64 - SEED_BITS)
