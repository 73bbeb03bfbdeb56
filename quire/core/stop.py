"""When is a sequence finished, and why. Stop strings are found in the text, by the output processor."""

from __future__ import annotations

from quire.core.sequence import Sequence
from quire.messages.output import FinishReason


def finish_of(seq: Sequence, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """(reason, stop token id or None) if the sequence's last token ends it."""
    group, token_ids = seq.group, seq.token_ids
    token_id = token_ids[-1]
    if token_id in group.stop_reasons and len(token_ids) > group.min_num_tokens:
        return FinishReason.STOP, group.stop_reasons[token_id]
    if len(token_ids) >= group.max_num_tokens or len(token_ids) >= max_model_len:
        return FinishReason.LENGTH, None
    return None
