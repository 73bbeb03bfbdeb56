"""Engines whose model transformers builds: the same tokens, as far as rounding allows, and no promise of bits."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.config.flags.args import EngineArgs
from quire.engine.core_startup import create_config
from quire.engine.identity import identity_of
from quire.engine.receipt import Transcript, receipt_of
from quire.errors import ConfigError
from tests.conftest import Checkpoint
from tests.engine.test_parity import NUM_TOKENS, WAYS, expected_by_transformers, prompts

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "dots1": ("dots1", {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gemma2": ("gemma2", {}),
    "mixtral": ("mixtral", {}),
}


def llm_of(directory: Path, **options: Any) -> LLM:
    given = {"dtype": "float32", "max_model_len": 128, "num_threads": 1, **options}
    return LLM(str(directory), model_impl="transformers", **given)


def tokens(llm: LLM, given: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(given, GREEDY)]


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_transformers_however_they_are_run(model: str, checkpoint: Checkpoint) -> None:
    family, overrides = MODELS[model]
    layers = {"num_hidden_layers": len(overrides["layer_types"])} if "layer_types" in overrides else {}
    directory, given = checkpoint(family, **overrides, **layers), prompts()[::4]
    with llm_of(directory, enable_prefix_caching=False) as llm:
        alone = [tokens(llm, [prompt])[0] for prompt in given]
    for prompt, produced in zip(given, alone, strict=True):
        assert produced == expected_by_transformers(directory, prompt, produced)
    for way, options in WAYS.items():
        with llm_of(directory, **options) as llm:
            assert tokens(llm, given) == alone, way
            if "preempted" in way:
                assert llm.engine.parts.core.scheduler.num_preemptions > 0
            if way == "batched":
                again = llm.generate(given, GREEDY)
                assert [output.outputs[0].token_ids for output in again] == alone, "from the prefix cache"
                assert sum(output.num_cached_tokens for output in again) > 0


def test_pages_may_be_of_another_type(checkpoint: Checkpoint) -> None:
    """Keys and values go through the ops, as quire's own do."""
    with llm_of(checkpoint("deepseek_v3"), kv_cache_dtype="int8") as llm:
        rounded = tokens(llm, prompts()[:3])
    with LLM(str(checkpoint("llama")), dtype="float32", max_model_len=128, kv_cache_dtype="int8") as own:
        expected = tokens(own, prompts()[:3])
    with llm_of(checkpoint("llama"), kv_cache_dtype="int8") as llm:
        assert tokens(llm, prompts()[:3]) == expected
    assert all(len(found) == NUM_TOKENS for found in rounded)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "int8"}, "quantization='int8' is for models that quire builds itself"),
        ({"quantization": "int4"}, "quantization='int4' is for models that quire builds itself"),
        ({"load_format": "dummy"}, "load_format='dummy' is for models that quire builds itself"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not supported"),
        ({"enable_lora": True}, "enable_lora=True is not supported"),
        ({"trust_remote_code": True}, "trust_remote_code=True is not supported"),
    ],
)
def test_what_it_cannot_have_is_refused(checkpoint: Checkpoint, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        llm_of(checkpoint("llama"), **options)


def test_the_identity_says_that_equal_tokens_are_not_promised(checkpoint: Checkpoint) -> None:
    model = str(checkpoint("llama"))
    own, foreign = (
        identity_of(create_config(EngineArgs(model=model, model_impl=impl)), "digest")
        for impl in ("auto", "transformers")
    )
    assert (own.row_invariant, own.transformers) == (True, "")
    assert not foreign.row_invariant
    assert foreign.transformers
    assert own.digest != foreign.digest
    assert any(line.startswith("row_invariant: True") for line in own.differences(foreign))


def test_a_receipt_is_replayed_with_a_warning(
    tmp_path: Path, checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, params = checkpoint("llama"), GREEDY.clone(max_tokens=6)
    with llm_of(directory) as llm:
        transcript = Transcript(params)
        transcript.add(llm.generate([prompts()[0]], params)[0])
        receipt = receipt_of(llm.engine.identity, [transcript])
    file = tmp_path / "receipt.json"
    file.write_text(receipt.to_json())
    assert main(["replay", str(file), "--model", str(directory)]) == 0
    said = capsys.readouterr()
    assert "not promised" in said.err
    assert "identical" in said.out
    logging.getLogger("quire").setLevel(logging.NOTSET)


def test_plan_and_show_know_such_a_model(checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(checkpoint("deepseek_v3"))
    assert main(["show", model, "--model-impl", "transformers"]) == 0
    assert "DeepseekV3ForCausalLM" in capsys.readouterr().out
    assert main(["plan", model, "--model-impl", "transformers"]) == 0
    assert "weights" in capsys.readouterr().out


def test_a_simulation_says_that_it_does_not_know_its_steps(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--arrivals", "poisson", "--rate", "5", "--model-impl", "transformers"]
    assert main(["simulate", str(checkpoint("llama")), *flags]) == 2
    assert "does not know the shapes of its products" in capsys.readouterr().err
