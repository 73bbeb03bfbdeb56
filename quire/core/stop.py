"""When is a sequence finished, and why. Stop strings are found in the text, by the output processor."""

from __future__ import annotations

from quire.core.sequence import Sequence
from quire.messages.output import FinishReason


def finish_of(seq: Sequence, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """(reason, stop token id or None) if the sequence's last token ends it.

    As in vLLM the first end-of-sequence id is reported without a stop reason, further ones and stop tokens with theirs.
    """
    request = seq.group.request
    params = request.sampling_params
    token_id = seq.token_ids[-1]
    num_output_tokens = seq.num_output_tokens
    if num_output_tokens > params.min_tokens or not params.min_tokens:
        if not params.ignore_eos and token_id in request.eos_token_ids:
            return FinishReason.STOP, None if token_id == request.eos_token_ids[0] else token_id
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
    if num_output_tokens >= request.max_tokens or seq.num_tokens >= max_model_len:
        return FinishReason.LENGTH, None
    return None
