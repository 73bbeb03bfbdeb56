"""Blocks of tokens of a calibration text, some of which are held out to measure perplexity. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.tokenizer.tokenizer import Tokenizer

CALIBRATION_TEXT = Path(__file__).with_name("calibration.txt")
"""Prose and Python: the documents and some sources of quire, under its licence."""
HELD_OUT_EVERY = 8
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of equally many tokens."""

    calibration: Sequence[Sequence[int]]
    held_out: Sequence[Sequence[int]]
    """Every eighth block of the text: never calibrated with."""


def read_blocks(file: Path, tokenizer: Tokenizer, length: int, max_blocks: int) -> Blocks:
    """Cut a text into blocks of `length` tokens; `max_blocks` of them are for calibration, spread over the text.

    Raises: ConfigError when the file cannot be read or is too short.
    """
    tokens = tokenizer.encode(_text(file), add_special_tokens=False, parse_special=False)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    step = length - len(start)
    blocks = [start + tokens[at : at + step] for at in range(0, len(tokens) - step + 1, step)]
    if len(blocks) < HELD_OUT_EVERY:
        raise ConfigError(
            f"{file} has {len(tokens):,} tokens, and {HELD_OUT_EVERY * length:,} are the least ({HELD_OUT_EVERY} "
            f"blocks of {length}); give a longer text with --calibration, or a smaller --sequence-len"
        )
    held_out = blocks[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    rest = [block for index, block in enumerate(blocks) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    count = min(max_blocks, len(rest))
    return Blocks(calibration=[rest[index * len(rest) // count] for index in range(count)], held_out=held_out)


def _text(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{file} has {file.stat().st_size:,} bytes, the limit is {MAX_BYTES:,}; give a part")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"the calibration text {file} cannot be read: {reason}") from None
