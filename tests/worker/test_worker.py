"""A worker among others in one process."""

from __future__ import annotations

from contextlib import ExitStack

from quire import LLM, SamplingParams
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops


def test_engines_with_different_ops_may_take_turns_in_one_process(checkpoint: Checkpoint) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    with ExitStack() as stack:
        engines, first = [], []
        for ops in [*available_ops(), *available_ops()]:
            llm = stack.enter_context(LLM(str(checkpoint("llama")), ops=ops, dtype="bfloat16", max_model_len=32))
            engines.append(llm)
            first.append(llm.generate([1, 2, 3], params)[0].outputs)
        for llm, expected in zip(engines, first, strict=True):
            assert llm.generate([1, 2, 3], params)[0].outputs == expected
