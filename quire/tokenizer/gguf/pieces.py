"""The merges that a SentencePiece vocabulary with scores stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby


def merges_of(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a third, in the order in which they are joined: the best score first.

    Where a piece can be made of several pairs, the pairs of pieces with lower ids come first, as transformers has it.
    """

    def order(pair: tuple[str, str]) -> tuple[int, int, int, int, int]:
        left, right = pair
        return -len(left), -len(right), pieces[left + right], pieces[left], pieces[right]

    merges: list[tuple[str, str]] = []
    ordered = sorted((-scores[index], piece) for piece, index in pieces.items())
    for _, alike in groupby(ordered, key=lambda item: item[0]):
        found = [pair for _, piece in alike for pair in _pairs(piece, pieces)]
        merges += sorted(found, key=order) if len(found) > 1 else found
    return merges


def _pairs(piece: str, pieces: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Two pieces that make one."""
    for end in range(1, len(piece)):
        left = piece[:end]
        if left in pieces and piece[end:] in pieces:
            yield left, piece[end:]
