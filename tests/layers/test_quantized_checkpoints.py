"""Checkpoints in the formats of others, read against the numbers that their writers say they stand for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.quantized.config import read_quantization
from quire.layers.quantization.unpack import UNPACK
from quire.loader.checkpoint import Checkpoint
from quire.ops.cpu import library
from quire.ops.dequantize import dequantize
from tests.checkpoints import VOCAB_SIZE, one_thread
from tests.quantized_checkpoints import FORMATS, make_quantized_checkpoint

PROMPT = [11, 92, 45, 200, 7, 31, 150, 64]


@pytest.mark.parametrize("format", FORMATS)
def test_every_weight_is_what_its_writer_meant(format: str, tmp_path: Path) -> None:
    quantized, plain = make_quantized_checkpoint(format, tmp_path)
    expected, stored = Checkpoint(plain), Checkpoint(quantized)
    quantization = read_quantization({"quantization_config": dict(FORMATS[format].config)}, "config.json")
    assert quantization is not None
    num_read = 0
    for name in expected.tensors:
        found = quantization.find(name, stored.header)
        assert (found is not None) == name.endswith("_proj.weight")
        if found is None:
            continue
        rows = UNPACK[found.packing](found, {role: stored.view(tensor) for role, tensor in found.tensors.items()})
        numbers = expected.view(name)
        torch.testing.assert_close(dequantize(rows).view(numbers.shape), numbers, rtol=1e-6, atol=1e-8)
        num_read += 1
    assert num_read == 14


def logprobs_of(directory: Path, **options: Any) -> torch.Tensor:
    """[V]: of the token after the prompt."""
    with LLM(str(directory), dtype="float32", max_logprobs=VOCAB_SIZE, num_gpu_blocks_override=64, **options) as llm:
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=VOCAB_SIZE, ignore_eos=True)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
        (found,) = output.outputs[0].logprobs
    values = torch.full((VOCAB_SIZE,), math.nan)
    for token, logprob in found.items():
        values[token] = logprob.logprob
    return values


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("format", ["ct-int4-asymmetric", "gptq-desc-act", "awq", "ct-w8a8", "fp8-blocks", "bnb-nf4"])
def test_the_model_computes_with_those_numbers(format: str, family: str, tmp_path: Path) -> None:
    with one_thread():
        quantized, plain = make_quantized_checkpoint(format, tmp_path, family)
        torch.testing.assert_close(logprobs_of(quantized, dequantize=True), logprobs_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["ct-int4", "ct-int4-asymmetric", "awq", "ct-w8a8"])
def test_the_kernels_are_near_those_numbers(format: str, tmp_path: Path) -> None:
    """They round the inputs of products that they compute in integers."""
    if not library.available():
        pytest.skip(str(library.unavailable_reason()))
    with one_thread():
        quantized, plain = make_quantized_checkpoint(format, tmp_path)
        assert float((logprobs_of(quantized) - logprobs_of(plain)).abs().max()) < 0.3
