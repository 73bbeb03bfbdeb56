"""Traces: what a file may hold, what is refused, and what a seed draws."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.simulation.synthetic import synthetic_trace
from quire.simulation.trace import MAX_LINE_BYTES, Prompts, check_fits, read_trace
from quire.simulation.workload import Workload
from tests.simulation.engines import request

WORKLOAD = Workload(num_requests=4000, rate=10.0, prompt_len=100, output_len=40, max_model_len=4096)


def test_a_file_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 6}\n\n'
        '{"arrival_s": 0.5, "prompt_tokens": 50, "output_tokens": 1, "prefix_id": "a", "prefix_tokens": 32, "n": 2}\n'
    )
    assert read_trace(str(file)) == [
        request(0.5, 50, 1, prefix_id="a", prefix_tokens=32, n=2),
        request(2.0, 5, 6),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "holds no requests"),
        ("{", "line 1"),
        ("[]", "line 1: Expected `object`"),
        ('{"arrival_s": 0, "prompt_tokens": 5}', "missing required field `output_tokens`"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "output": 2}', "unknown field `output`"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 1}', "arrival_s"),
        ('{"arrival_s": NaN, "prompt_tokens": 5, "output_tokens": 1}', "line 1"),
        ('{"arrival_s": 1e999, "prompt_tokens": 5, "output_tokens": 1}', "line 1"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 5.5, "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1e9}', "output_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 99999999999999999999}', "output_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "n": 5000}', "n`"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_id": 3}', "belong together"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_tokens": 3}', "belong together"),
        (
            '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "prefix_id": 1, "prefix_tokens": 6}',
            "more than the 5 of the prompt",
        ),
        ('{"arrival_s": 1, "arrival_s": 2, "prompt_tokens": 5, "output_tokens": 1}', "'arrival_s' is given twice"),
        (
            '{"prompt_tokens": 5, "output_tokens": 1, "tenant": "a", "arrival_s": 1, "\\u0074enant": "\\"b"}',
            "line 1: 'tenant' is given twice",
        ),
        ("\xff", "line 1"),
        ("[" * (MAX_LINE_BYTES - 1), "line 1"),
        (" " * MAX_LINE_BYTES + "{}", f"line 1 has more than {MAX_LINE_BYTES} bytes"),
    ],
)
def test_what_is_no_trace_is_refused(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(line.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        read_trace(str(file))
    assert message in str(error.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no regular file"):
        read_trace(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(tmp_path / "nothing"))


def test_requests_that_no_engine_would_take_are_refused() -> None:
    check_fits([request(0, 60, 4)], max_model_len=64, max_num_seqs=2)
    with pytest.raises(ConfigError, match="request 2 of the trace has 61 prompt and 4 output tokens, 65 in all"):
        check_fits([request(0, 60, 4), request(0, 61, 4)], max_model_len=64, max_num_seqs=2)
    with pytest.raises(ConfigError, match="3 branches"):
        check_fits([request(0, 6, 4, n=3)], max_model_len=64, max_num_seqs=2)


def test_prompts_share_what_the_trace_says_and_nothing_else() -> None:
    prompts = Prompts()
    given = [
        request(0, 6, prefix_id="a", prefix_tokens=4),
        request(0, 5, prefix_id="a", prefix_tokens=3),
        request(0, 6, prefix_id="b", prefix_tokens=4),
        request(0, 6),
    ]
    tokens = [prompts.request(number, one).prompt_token_ids for number, one in enumerate(given)]
    assert [len(one) for one in tokens] == [6, 5, 6, 6]

    def num_shared(one: list[int], other: list[int]) -> int:
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))

    shared = {(i, j): num_shared(tokens[i], tokens[j]) for i, j in itertools.combinations(range(4), 2)}
    assert shared.pop((0, 1)) == 3
    assert set(shared.values()) == {0}


@pytest.mark.parametrize("lengths", ["fixed", "uniform", "lognormal"])
def test_lengths_have_their_mean(lengths: str) -> None:
    trace = synthetic_trace(replace(WORKLOAD, lengths=lengths, sigma=0.5), seed=3)  # type: ignore[arg-type]
    assert statistics.fmean(one.prompt_tokens for one in trace) == pytest.approx(100, rel=0.05)
    assert statistics.fmean(one.output_tokens for one in trace) == pytest.approx(40, rel=0.05)
    assert trace[-1].arrival_s == pytest.approx(400, rel=0.1)


def test_a_seed_draws_one_trace() -> None:
    some = replace(WORKLOAD, num_requests=50, lengths="lognormal")
    assert synthetic_trace(some, seed=1) == synthetic_trace(some, seed=1)
    assert synthetic_trace(some, seed=1) != synthetic_trace(some, seed=2)


def test_made_up_requests_fit_the_context() -> None:
    trace = synthetic_trace(
        replace(WORKLOAD, lengths="lognormal", sigma=3.0, num_prefixes=2, prefix_len=50, max_model_len=64), seed=1
    )
    check_fits(trace, max_model_len=64, max_num_seqs=1)
    assert {one.prefix_tokens for one in trace} == {50}
    assert {one.prefix_id for one in trace} == {0, 1}
