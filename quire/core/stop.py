"""When is a sequence finished, and why. Stop strings are found in the text, by the output processor."""

from __future__ import annotations

from quire.core.sequence import Sequence
from quire.messages.output import FinishReason


def finish_of(seq: Sequence, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """(reason, stop token id or None) if the sequence's last token ends it."""
    group, token_ids = seq.group, seq.token_ids
    num_tokens = len(token_ids)
    if token_ids[-1] in group.stop_reasons and num_tokens > group.min_num_tokens:
        return FinishReason.STOP, group.stop_reasons[token_ids[-1]]
    if num_tokens >= group.max_num_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None
