"""A worker among others in one process."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

import pytest
import torch

from quire import LLM, SamplingParams
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops
from tests.worker.links import CopyLink


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


@pytest.mark.parametrize("ops", available_ops())
@pytest.mark.parametrize("starts_inside", [True, False])
def test_an_engine_serves_inside_and_outside_of_inference_mode(
    checkpoint: Checkpoint, ops: str, starts_inside: bool
) -> None:
    """Tensors that were made inside cannot be changed outside: caches, logits, what the requests exclude."""
    params = SamplingParams(n=2, seed=1, max_tokens=6, logit_bias={5: 2.0}, logprobs=1, prompt_logprobs=1, min_tokens=4)
    prompt = list(range(1, 20))
    outputs = []
    with ExitStack() as stack:
        for inside in (starts_inside, not starts_inside, starts_inside):
            with torch.inference_mode() if inside else nullcontext():
                if not outputs:
                    options = {"ops": ops, "dtype": "bfloat16", "max_model_len": 32}
                    llm = stack.enter_context(LLM(str(checkpoint("llama")), **options))
                outputs.append(llm.generate([prompt, prompt[:5]], params, use_tqdm=False))
    first, *others = [[output.outputs for output in run] for run in outputs]
    assert others == [first, first]


def test_an_engine_made_in_inference_mode_computes_outside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.worker.model_runner.link_to", lambda device: CopyLink())
    params = SamplingParams(max_tokens=2, temperature=0.0)
    with torch.inference_mode():
        made_inside = LLM(ops="reference", max_model_len=32)
    with made_inside, LLM(ops="reference", max_model_len=32) as made_outside:
        found = [llm.generate(["def f("], params, use_tqdm=False)[0].outputs for llm in (made_inside, made_outside)]
    assert found[0][0].token_ids == found[1][0].token_ids
