"""What a request's lists cost: once per request, and no more than the plan says."""

from __future__ import annotations

import tracemalloc

import msgspec

from quire.config.memory.plan import controls_bytes
from quire.engine.front.input_processor import as_bits
from quire.messages.request import EngineCoreRequest
from quire.messages.step import NewSequenceData, SchedulerOutputs
from quire.sampling.controls import Controls
from quire.sampling_params import BOUNDS, MAX_BAD_WORD_TOKENS, SamplingParams
from quire.worker.input_batch import InputBatch

VOCAB_SIZE = 150_000


def largest_request() -> EngineCoreRequest:
    """Every list of tokens at its bound, with no small numbers, which Python keeps once for all."""
    num_stops, num_biases = BOUNDS["stop_token_ids"].items, BOUNDS["logit_bias"].items
    assert num_stops is not None
    assert num_biases is not None
    length = 16
    words = tuple(
        tuple(1000 + word if place == 0 else 2000 + place for place in range(length))
        for word in range(MAX_BAD_WORD_TOKENS // length)
    )
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(
            min_tokens=5,
            stop_token_ids=list(range(1000, 1000 + num_stops)),
            logit_bias={1000 + index: 0.5 + index for index in range(num_biases)},
        ),
        seed=1,
        max_tokens=16,
        bad_words_token_ids=words,
        allowed_tokens=as_bits(range(0, VOCAB_SIZE, 3), VOCAB_SIZE),
    )


def test_the_largest_request_takes_no_more_than_is_planned_for_it() -> None:
    frame = msgspec.msgpack.encode(largest_request())
    Controls(msgspec.msgpack.decode(frame, type=EngineCoreRequest))  # what is made once for all
    tracemalloc.start()
    request = msgspec.msgpack.decode(frame, type=EngineCoreRequest)
    controls = Controls(request)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    taken += controls.excluded(VOCAB_SIZE).nbytes
    assert 0.5 * controls_bytes(VOCAB_SIZE) < taken <= controls_bytes(VOCAB_SIZE)


def test_branches_share_what_is_made_of_a_request() -> None:
    request, batch = largest_request(), InputBatch(max_num_seqs=4, max_num_blocks=1)
    for seq_id in range(3):
        new = NewSequenceData(seq_id, request.request_id, branch=seq_id, output_token_ids=[5], block_ids=[(0, [])])
        batch.apply(SchedulerOutputs(new_requests=[] if seq_id else [request], new_sequences=[new]))
    assert len({id(row.controls) for row in batch.rows.values()}) == 1
    batch.apply(SchedulerOutputs(removed_seq_ids=[0, 1, 2], removed_request_ids=[request.request_id]))
    again = largest_request()
    new = NewSequenceData(3, again.request_id, 0, [], [(0, [])])
    batch.apply(SchedulerOutputs(new_requests=[again], new_sequences=[new]))
    assert batch.rows[3].controls.request is again
