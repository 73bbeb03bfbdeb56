"""Whole models on the Triton ops, interpreted: the reference's logits, and bits that no chunk or neighbour changes."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire import LLM, SamplingParams
from quire.config.gguf.config_json import gguf_config
from quire.config.memory.weights.sizes import weight_bytes
from quire.errors import ConfigError
from quire.loader.model_impl import read_model_arch
from quire.ops.backends import ops_of
from tests.config.test_weight_shapes import tensors_of
from tests.gguf.files import GgufFile
from tests.models.harness import Harness
from tests.models.test_rounded import LIMITS, error
from tests.quantized_checkpoints import make_quantized_checkpoint

pytest.importorskip("triton", reason="triton is not installed")
Checkpoint = Callable[..., Path]
TOLERANCE = 1e-4
DEVICE = "cuda" if os.environ["TRITON_INTERPRET"] == "0" else "cpu"
PARITY = {
    "llama": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2},
    "mixtral": {"num_hidden_layers": 2},
    "gemma4_text": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "mimo_v2_flash": {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    "deepseek_v2": {"num_hidden_layers": 2},
    "mamba": {"num_hidden_layers": 1},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "qwen3_next": {"num_hidden_layers": 2},
    "kimi_linear": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 2},
}
"""A plain decoder; one with windows, soft caps, norms on both sides and a scaled embedding; one of experts; one with
experts beside an MLP, embeddings of each layer, and heads that differ from layer to layer; one with values
narrower than keys, and sinks; one with latents; and recurrent layers of most kinds."""
LONG = ("llama", "gemma2", "mixtral", "deepseek_v2")
"""Families whose prompt goes past a page: the interpreter is slow."""
WAITS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "bincount")
"""Operations of torch for whose result the host waits. `.tolist()` and `.cpu()` of a host's tensor are none of them:
`tests/contracts/test_device_waits.py` finds those."""


@pytest.fixture(autouse=True)
def _inference(triton_interpreter: None) -> object:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("family", PARITY)
def test_logits_equal_those_of_the_reference(checkpoint: Checkpoint, family: str) -> None:
    directory = checkpoint(family, **PARITY[family])
    token_ids = list(range(3, 22 if family in LONG else 11))
    expected = Harness(ops_of("reference"), directory).logits(token_ids)
    harness = Harness(ops_of("triton", device=DEVICE), directory)
    actual = harness.logits(token_ids).cpu()
    assert (actual - expected).abs().max().item() < TOLERANCE
    row, other, first = harness.add(token_ids), harness.add(list(range(40, 44))), len(token_ids) // 2
    chunks = [harness.step([(row, first), (other, 3)])[0], harness.step([(other, 1), (row, len(token_ids) - first)])[1]]
    assert torch.equal(torch.cat(chunks).cpu(), actual)


class NoWaits(TorchDispatchMode):
    """Fails where the host would wait for a device, though here it is one itself."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        assert name not in WAITS, f"{name} makes the host wait for the device"
        assert not by_mask, "a mask as an index makes the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v2", "mamba"])
def test_no_forward_waits_for_the_device(checkpoint: Checkpoint, family: str) -> None:
    harness = Harness(ops_of("triton", device=DEVICE), checkpoint(family, **{**PARITY[family], "num_hidden_layers": 1}))
    row, other = harness.add([5, 6, 7, 8]), harness.add([9])
    harness.step([(row, 3)])  # the first step compiles, and finds out where weights are
    inputs = harness.inputs([(row, 1), (other, 1)])
    with forbidden_waits():
        harness.model.compute_logits(harness.model.forward(*inputs))


@contextmanager
def forbidden_waits() -> Iterator[None]:
    """On a GPU torch itself tells."""
    if DEVICE == "cpu":
        with NoWaits():
            yield
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # that this mode does not see all waits
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


WAITING: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("name", WAITING)
def test_a_wait_in_a_forward_is_found(name: str) -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises((AssertionError, RuntimeError)), forbidden_waits():
        WAITING[name](x)


def assert_like_reference(file: Path, raw: dict[str, Any]) -> None:
    token_ids, arch = list(range(3, 9)), read_model_arch(raw, file)
    expected = Harness(ops_of("reference"), file, arch=arch).logits(token_ids)
    harness = Harness(ops_of("triton", device=DEVICE), file, arch=arch)
    actual = harness.logits(token_ids).cpu()
    assert (actual - expected).abs().max().item() < TOLERANCE
    row = harness.add(token_ids)
    chunks = [harness.step([(row, 5)])[0], harness.step([(row, 1)])[0]]
    assert torch.equal(torch.cat(chunks).cpu(), actual)


@pytest.mark.parametrize("format", ["ct-int4-asymmetric", "ct-mxfp4", "fp8-blocks"])
def test_quantised_experts_give_what_the_reference_makes_of_them(format: str, tmp_path: Path) -> None:
    quantized, _ = make_quantized_checkpoint(
        format, tmp_path, "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=64
    )
    assert_like_reference(quantized, json.loads((quantized / "config.json").read_text()))


@pytest.mark.parametrize("quantization", LIMITS)
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v2", "mamba"])
def test_weights_rounded_at_the_start_change_little(checkpoint: Checkpoint, family: str, quantization: str) -> None:
    directory, token_ids = checkpoint(family, **{**PARITY[family], "num_hidden_layers": 1}), list(range(3, 14))
    exact = Harness(ops_of("reference"), directory).logits(token_ids)
    harness = Harness(ops_of("triton", device=DEVICE), directory, quantization=quantization)
    rounded = harness.logits(token_ids)
    assert 0 < error(rounded.cpu(), exact) < LIMITS[quantization]
    row, other = harness.add(token_ids), harness.add([40, 41])
    chunks = [harness.step([(row, 5), (other, 1)])[0], harness.step([(other, 1), (row, 6)])[1]]
    assert torch.equal(torch.cat(chunks), rounded)
    loaded = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in tensors_of(harness.model)}.values())
    assert loaded == weight_bytes(harness.arch, "float32", quantization, ops="triton")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_gguf_file_gives_what_the_reference_makes_of_it(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", num_hidden_layers=1, hidden_size=256, intermediate_size=256, tie_word_embeddings=False)
    file = GgufFile(source, kind=kind).write(tmp_path / "model.gguf")
    assert_like_reference(file, gguf_config(file))


def test_an_engine_generates_what_the_reference_generates(checkpoint: Checkpoint) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=5, n=2, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, repetition_penalty=1.3),
    ]
    found = []
    for ops, device in (("reference", "cpu"), ("triton", DEVICE)):
        options = {"ops": ops, "device": device, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
        with LLM(str(checkpoint("llama", num_hidden_layers=2)), **options) as llm:
            prompts = [
                {"prompt_token_ids": [5, 6, 7]},
                {"prompt_token_ids": [9, 8]},
                {"prompt_token_ids": [5, 6, 7, 7]},
            ]
            found.append(llm.generate(prompts, params, use_tqdm=False))
    expected, actual = ([[out.token_ids for out in result.outputs] for result in results] for results in found)
    assert actual == expected


@pytest.mark.parametrize(
    "family",
    [
        "jetmoe",
        "longcat_flash",
        "deepseek_v32",
        "axk2",
        "dots3_note_text",
        "deepseek_v4",
        "hy_v4",
        "qwen4_exp_text",
        "zaya",
    ],
)
def test_a_model_that_needs_what_is_missing_is_refused_by_name(family: str, checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"the triton ops do not have .*yet; give device='cpu'"):
        LLM(str(checkpoint(family)), ops="triton", device=DEVICE, dtype="float32", max_model_len=64)
