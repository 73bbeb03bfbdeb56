"""The bytes of all tokens of a tokenizer, for grammars: what an output says must be the bytes of its tokens, joined."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import UnsupportedFeature
from quire.structured.grammar import Vocabulary
from quire.tokenizer.tokenizer import Tokenizer
from quire.utils.cancellation import check_cancelled


def vocabulary_of(tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model that can produce `vocab_size` tokens.

    Byte-level BPE and SentencePiece with bytes as a fall-back are known; the text of other tokenizers' tokens depends
    on the tokens beside them, as WordPiece's spaces do.

    Raises: UnsupportedFeature.
    """
    if tokenizer is None:
        raise _refusal("it needs a tokenizer, and this engine runs with skip_tokenizer_init=True")
    if not (tokenizer.is_byte_level or tokenizer.byte_ids):
        raise _refusal(
            "the text of this model's tokens depends on the tokens beside them. It needs a tokenizer of byte-level "
            "BPE, or of SentencePiece with byte fall-back"
        )
    if not eos_token_ids:
        raise _refusal("this model has no end-of-sequence token, which ends an output whose form is complete")
    return Vocabulary(
        tokens=[_bytes_of(tokenizer, token_id) for token_id in range(vocab_size)],
        special_ids=tokenizer.special_ids | set(eos_token_ids),
        eos_token_ids=tuple(eos_token_ids),
    )


def has_vocabulary(tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]) -> bool:
    """Whether `vocabulary_of` would give one."""
    return tokenizer is not None and bool((tokenizer.is_byte_level or tokenizer.byte_ids) and eos_token_ids)


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    check_cancelled()
    return tokenizer.token_bytes(token_id) if tokenizer.has_token(token_id) else b""


def _refusal(why: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"structured_outputs is not supported here: {why}", parameter="structured_outputs")
