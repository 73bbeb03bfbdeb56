"""What the benchmark of the memory plan asks for is accepted, and at the bounds."""

from __future__ import annotations

import random

from benchmarks.largest_requests import Bounds
from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import create_config
from quire.engine.front.startup import load_front
from quire.sampling_params import BOUNDS, MAX_BAD_WORD_TOKENS, SamplingParams


def test_every_request_that_is_drawn_is_accepted_and_some_are_at_each_bound() -> None:
    front = load_front(create_config(EngineArgs(max_num_seqs=12, kv_cache_memory_bytes=64 << 20, max_logprobs=50)))
    bounds = Bounds(front.config, front.input_processor, random.Random(0))
    requests = []
    for number in range(60):
        prompt, fields = bounds.draw()
        request = front.input_processor.process(str(number), {"prompt_token_ids": prompt}, SamplingParams(**fields))
        requests.append(request.core)
    params = [request.sampling_params for request in requests]
    length = front.config.model_config.max_model_len
    assert max(one.n for one in params) == max(one.best_of or 0 for one in params) == 12
    assert max(one.beam_width or 0 for one in params) == 12
    assert max(one.num_logprobs or 0 for one in requests) == max(one.prompt_logprobs or 0 for one in params) == 50
    assert max(len(request.prompt_token_ids) for request in requests) == length - 1
    assert max(len(request.prompt_token_ids) + request.max_tokens for request in requests) == length
    for name in ("stop_token_ids", "logit_bias"):
        assert max(len(getattr(one, name) or ()) for one in params) == BOUNDS[name].items
    assert max(len(request.allowed_tokens or b"") for request in requests) == 4096 // 8
    most = max(sum(map(len, request.bad_words_token_ids)) for request in requests)
    assert MAX_BAD_WORD_TOKENS * 0.9 <= most <= MAX_BAD_WORD_TOKENS
    assert len({tuple(request.prompt_token_ids) for request in requests}) < len(requests), "some come again"
