"""Models that transformers builds, over quire's paged cache, against transformers with its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.arch import ModelArch
from quire.config.memory.plan import MemoryUse, plan_memory
from quire.config.memory.weights.shapes import num_parameters
from quire.errors import CheckpointError, ConfigError, MissingDependency
from quire.loader import model_impl
from quire.loader.load import load_model
from quire.loader.model_impl import check_runs, read_model_arch
from quire.models.fallback.attention import Mask
from quire.models.fallback.model import TransformersModel
from quire.ops.backends import ops_of
from quire.ops.contracts.ops import Ops
from quire.sampling.torch_mode import torch_mode
from tests.checkpoints import in_transformers, one_thread
from tests.conftest import Checkpoint
from tests.engine.test_parity import available_ops
from tests.models.cases.rotations import LONGROPE
from tests.models.harness import Harness
from tests.ops.implementations import REFERENCE

TOLERANCE = 1e-4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", {}),
    "arcee-tied-biased": ("arcee", {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4}),
    "nemotron": ("nemotron", {}),
    "nemotron-one-kv-head": ("nemotron", {"num_key_value_heads": 1, "partial_rotary_factor": 0.25}),
    "persimmon": ("persimmon", {}),
    "persimmon-plain-heads": ("persimmon", {"qk_layernorm": False}),
    "vaultgemma": ("vaultgemma", {}),
    "vaultgemma-capped": ("vaultgemma", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "cwm": ("cwm", {}),
    "cwm-all-full": ("cwm", {"layer_types": ["full_attention"] * 4}),
    "dots1": ("dots1", {}),
    "dots1-windows": ("dots1", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 24}),
    "phimoe": ("phimoe", {}),
    "phimoe-biased": ("phimoe", {"lm_head_bias": True, "attention_bias": True, "num_local_experts": 3}),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2-odd": ("minimax_m2", {"num_attention_heads": 6, "num_key_value_heads": 3, "num_experts_per_tok": 3}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-wide-values": ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 32}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {}),
    "olmo2": ("olmo2", {}),
    "mixtral": ("mixtral", {}),
    "gpt2": ("gpt2", {}),
    "granite": ("granite", {}),
}
"""Families of quire's own are among them: what they compute is known twice."""


class Foreign(Harness):
    """A harness whose model transformers builds."""

    def logits(self, token_ids: list[int], *, chunk: int | None = None) -> Tensor:
        with torch_mode():
            return super().logits(token_ids, chunk=chunk)


@pytest.fixture(params=available_ops())
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_of(request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(directory: Path, token_ids: list[int]) -> Tensor:
    with torch.inference_mode(), one_thread():
        return in_transformers(directory)(torch.tensor([token_ids])).logits[0].float()


def arch_in(directory: Path) -> ModelArch:
    raw = json.loads((directory / "config.json").read_text())
    return read_model_arch(raw, directory, "transformers")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_whole_in_chunks_and_in_company(checkpoint: Checkpoint, ops: Ops, case: str) -> None:
    family, overrides = CASES[case]
    if ops.name == "reference" and overrides:
        pytest.skip("the kernels below the model are compared with the reference elsewhere")
    directory = checkpoint(family, **overrides)
    harness = Foreign(ops, directory, arch=arch_in(directory))
    token_ids, other = prompt(61), prompt(23, seed=1)
    wanted = expected(directory, token_ids)
    assert (harness.logits(token_ids) - wanted).abs().max().item() < TOLERANCE
    assert (harness.logits(token_ids, chunk=7) - wanted).abs().max().item() < TOLERANCE
    rows = [harness.add(ids) for ids in (other, token_ids)]
    with torch_mode():
        parts = [harness.step([(rows[0], 20), (rows[1], 40)]), harness.step([(rows[1], 21), (rows[0], 3)])]
    assert (torch.cat((parts[0][1], parts[1][0])) - wanted).abs().max().item() < TOLERANCE
    assert (torch.cat((parts[0][0], parts[1][1])) - expected(directory, other)).abs().max().item() < TOLERANCE


def test_half_precision_stays_close(checkpoint: Checkpoint, ops: Ops) -> None:
    directory, token_ids = checkpoint("arcee"), prompt(40)
    exact = expected(directory, token_ids)
    with torch.inference_mode(), one_thread():
        theirs = in_transformers(directory, torch.bfloat16)(torch.tensor([token_ids])).logits[0].float()
    ours = Foreign(ops, directory, dtype=torch.bfloat16, arch=arch_in(directory)).logits(token_ids)
    assert (ours - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


def test_the_weights_are_counted_from_the_files(checkpoint: Checkpoint) -> None:
    directory = checkpoint("deepseek_v3")
    arch, model = arch_in(directory), in_transformers(directory)
    assert num_parameters(arch) == sum(tensor.numel() for tensor in model.state_dict().values())
    use = MemoryUse(
        dtype="bfloat16",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=128,
        max_logprobs=5,
        block_size=16,
        kv_cache_dtype="bfloat16",
    )
    plan = plan_memory(arch, use, 10)
    assert plan.weights == 2 * num_parameters(arch)
    assert plan.kv_cache == 10 * 16 * 3 * 4 * 2 * 24 * 2  # layers, heads, keys and values, the larger size, bytes


def test_the_weights_are_in_memory_of_their_own(tmp_path: Path, checkpoint: Checkpoint, ops: Ops) -> None:
    """What is done to the file after the start changes no answer."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in checkpoint("arcee").iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    harness = Foreign(ops, directory, arch=arch_in(directory))
    before = harness.logits(prompt(9))
    with (directory / "model.safetensors").open("r+b") as stream:
        stream.seek(-60_000, 2)
        stream.write(b"\x3c" * 60_000)
    assert torch.equal(harness.logits(prompt(9)), before)


def test_layers_with_a_window_keep_only_that(checkpoint: Checkpoint) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    arch = arch_in(checkpoint("dots1", layer_types=kinds, sliding_window=24))
    assert [mixer.window for mixer in arch.mixers] == [24, None, 24, None]


def test_a_rotation_that_follows_the_length_is_kept_to_the_original_one(checkpoint: Checkpoint) -> None:
    """Else the frequencies of one request would be chosen by the length of another."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    arch = arch_in(checkpoint("arcee", rope_parameters=rope, max_position_embeddings=128))
    assert arch.max_position_embeddings == 128
    stretched = checkpoint("phi3", **LONGROPE, original_max_position_embeddings=64)
    assert arch_in(stretched).max_position_embeddings == 64


# -- who builds a model ---------------------------------------------------------------------------------------


def test_auto_takes_quires_own_first(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    raw = json.loads((directory / "config.json").read_text())
    assert read_model_arch(raw, directory).stored is None
    assert arch_in(directory).stored is not None


@pytest.fixture
def stranger(tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Path]:
    """A model of which quire knows nothing."""
    from quire.config import families

    known = {name: known for name, known in families.ARCHITECTURES.items() if name != "arcee"}
    monkeypatch.setattr(families, "ARCHITECTURES", known)
    directory = checkpoint("arcee")
    return json.loads((directory / "config.json").read_text()), directory


def test_auto_says_why_and_what_it_costs(
    stranger: tuple[dict[str, Any], Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert read_model_arch(*stranger).stored is not None
    for part in ("ArceeForCausalLM", "no family", "slower", "row_invariant: false"):
        assert part in caplog.text


def test_quire_refuses_what_it_does_not_have(stranger: tuple[dict[str, Any], Path]) -> None:
    with pytest.raises(ConfigError, match="'ArceeForCausalLM' is not supported"):
        read_model_arch(*stranger, "quire")


def test_without_transformers_it_is_said_how_to_install_it(
    stranger: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_impl, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"not supported.*pip install \"quire\[transformers\]\""):
        read_model_arch(*stranger)
    with pytest.raises(MissingDependency, match=r"quire\[transformers\]"):
        check_runs(stranger[0], "config.json")


def test_code_of_the_repository_is_never_run(
    stranger: tuple[dict[str, Any], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw, directory = stranger
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    mark = tmp_path / "was_run"
    for name in ("modeling_mine.py", "configuration_mine.py"):
        (tmp_path / name).write_text(f"open({str(mark)!r}, 'w')")
    classes = {"AutoConfig": "configuration_mine.Config", "AutoModelForCausalLM": "modeling_mine.Model"}
    raw = {**raw, "auto_map": classes, "attn_implementation": "someone/attention", "_attn_implementation": "someone/x"}
    arch = read_model_arch(raw, tmp_path)
    load_model(tmp_path, arch, ops=REFERENCE, dtype=torch.float32, max_model_len=64)
    assert not mark.exists()
    assert "auto_map" in caplog.text


# -- what is refused ------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no model_type of transformers": (
        {"model_type": "nobody", "architectures": ["NobodyForCausalLM"]},
        "no model_type",
    ),
    "a state": ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "recurrent state"),
    "no interface": ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, "attention interface"),
    "chunks": ({"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}, "chunked_attention"),
    "no text": ({"model_type": "vit", "architectures": ["ViTModel"]}, "no head that predicts tokens"),
    "an encoder": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "with an encoder"),
    "another class": ({"model_type": "arcee", "architectures": ["ApertusForCausalLM"]}, "that is ArceeForCausalLM"),
    "layers that differ": (
        {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]},
        "through transformers",
    ),
    "nonsense": (
        {"model_type": "arcee", "architectures": ["ArceeForCausalLM"], "num_hidden_layers": "three"},
        "num_hidden_layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_before_its_weights_are_there(tmp_path: Path, case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(ConfigError, match=reason):
        read_model_arch(config, tmp_path, "transformers")


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, "s_aux"),
        ("diffllama", {}, "do not attend once each"),
        ("doge", {}, "masks are no tensors"),
        ("bert", {}, "not causal"),
        ("jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}, "KV heads"),
    ],
)
def test_what_a_model_does_beside_plain_attention_is_found_by_trying(
    tmp_path: Path, family: str, overrides: dict[str, Any], reason: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64}
    config = AutoConfig.for_model(family, **{**sizes, **heads, "bos_token_id": 1, "eos_token_id": 2, **overrides})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path, arch_in(tmp_path), ops=REFERENCE, dtype=torch.float32, max_model_len=64)


def test_what_layers_learn_without_attention_is_found(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that shifts tokens, as RWKV does: each sees a part of the one before it."""
    from transformers.models.arcee.modeling_arcee import ArceeMLP

    plain = ArceeMLP.forward
    monkeypatch.setattr(ArceeMLP, "forward", lambda self, x: plain(self, x + torch.roll(x, 1, dims=1)))
    directory = checkpoint("arcee")
    with pytest.raises(ConfigError, match="token by token"):
        load_model(directory, arch_in(directory), ops=REFERENCE, dtype=torch.float32, max_model_len=64)


def test_a_mask_is_causal_a_window_or_refused() -> None:
    assert Mask(lambda batch, head, query, key: key <= query).window(40) is None
    assert Mask(lambda batch, head, query, key: (key <= query) & (key > query - 7)).window(40) == 7
    assert Mask(lambda batch, head, query, key: (key <= query) & (key > query - 50)).window(40) is None
    for other in (
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & (key // 16 == query // 16),
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
    ):
        with pytest.raises(ConfigError, match="neither causal nor a sliding window"):
            Mask(other).window(40)


def test_pickled_weights_are_refused(tmp_path: Path, checkpoint: Checkpoint) -> None:
    raw = json.loads((checkpoint("arcee") / "config.json").read_text())
    torch.save({"model.norm.weight": torch.ones(64)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        read_model_arch(raw, tmp_path, "transformers")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("missing", "missing"),
        ("more", r"model\.extra\.weight is not used"),
        ("shape", "cannot be loaded"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, checkpoint: Checkpoint, change: str, problem: str
) -> None:
    from safetensors.torch import load_file, save_file

    source = checkpoint("arcee")
    tensors = load_file(source / "model.safetensors")
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "more":
        tensors["model.extra.weight"] = torch.ones(3)
    else:
        tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=problem):
        load_model(tmp_path, arch_in(tmp_path), ops=REFERENCE, dtype=torch.float32, max_model_len=64)


def test_the_model_is_what_load_model_gives(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    model = load_model(
        directory, arch_in(directory), ops=REFERENCE, dtype=torch.float32, max_model_len=64, num_threads=2
    )
    assert isinstance(model, TransformersModel)
