"""The merges that a SentencePiece vocabulary with scores stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def merges_of(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that make a third, in the order in which they are joined: the best score first.

    Where a piece can be made of several pairs, the pairs of pieces with lower ids come first, as transformers has it.
    """
    pairs = sorted(_pairs(pieces, scores))
    return [(left, right) for *_, left, right in pairs]


def _pairs(
    pieces: Mapping[str, int], scores: Sequence[float]
) -> Iterator[tuple[float, int, int, int, int, int, str, str]]:
    """What orders a pair, and the pair."""
    for piece, index in pieces.items():
        for end in range(1, len(piece)):
            left, right = piece[:end], piece[end:]
            if left in pieces and right in pieces:
                yield -scores[index], -len(left), -len(right), index, pieces[left], pieces[right], left, right
