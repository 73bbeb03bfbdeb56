"""Every family against transformers: float32 logits, whole and in chunks, alone and in company."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.memory.weights.shapes import num_parameters
from quire.loader.unread import DECAYS, unread_parts
from quire.ops.backends import ops_of
from quire.ops.contracts.ops import Ops
from tests.checkpoints import in_transformers, one_thread
from tests.family_configs import FAMILIES
from tests.models.cases import CASES
from tests.models.cases.rotations import LONGROPE, rope
from tests.models.harness import Harness, arch_of
from tests.ops.implementations import implementations_of

PROMPT_LENGTHS = (1, 16, 61)
TOLERANCE = 1e-4
DERIVED = re.compile(rf"{DECAYS.pattern}|\.(layer_multipliers|ngram_heads_\w+)$")
"""Numbers of a checkpoint that follow from config.json, and are no parameters."""
Checkpoint = Callable[..., Path]


@pytest.fixture(params=implementations_of("linear"))
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """The ops that the models run on."""
    with one_thread() if request.param == "reference" else nullcontext():  # as the engine runs it
        yield ops_of(request.param)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def transformers_logits(directory: Path, token_ids: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Shapes: -> [T, V] float32."""
    with torch.no_grad(), one_thread():
        return in_transformers(directory, dtype)(torch.tensor([token_ids])).logits[0].float()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(ops: Ops, checkpoint: Checkpoint, case: str) -> None:
    family, overrides = CASES[case]
    directory = checkpoint(family, **overrides)
    harness = Harness(ops, directory)
    for length in PROMPT_LENGTHS:
        token_ids = prompt(length, seed=length)
        actual = harness.logits(token_ids)
        assert (actual - transformers_logits(directory, tuple(token_ids))).abs().max().item() < TOLERANCE
        assert torch.equal(harness.logits(token_ids, chunk=7), actual), "chunks of 7 changed bits"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_company(ops: Ops, checkpoint: Checkpoint, family: str, dtype: torch.dtype) -> None:
    harness = Harness(ops, checkpoint(family), dtype=dtype)
    prompts = [prompt(length, seed=length) for length in (3, 40, 17, 90, 1)]
    alone = [harness.logits(token_ids) for token_ids in prompts]
    rows = [harness.add(token_ids) for token_ids in prompts]
    parts: list[list[Tensor]] = [[] for _ in rows]
    sizes = torch.Generator().manual_seed(0)
    while any(row.num_computed < len(row.token_ids) for row in rows):
        wanted = [int(torch.randint(1, 20, (), generator=sizes)) for _ in rows]
        work = [
            (index, row, min(count, len(row.token_ids) - row.num_computed))
            for index, (row, count) in enumerate(zip(rows, wanted, strict=True))
            if row.num_computed < len(row.token_ids)
        ]
        for (index, _, _), logits in zip(work, harness.step([(row, count) for _, row, count in work]), strict=True):
            parts[index].append(logits)
    for index, expected in enumerate(alone):
        assert torch.equal(torch.cat(parts[index]), expected), f"prompt {index}"


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_stays_close_to_transformers(ops: Ops, checkpoint: Checkpoint, family: str) -> None:
    directory, token_ids = checkpoint(family), prompt(40)
    exact = transformers_logits(directory, tuple(token_ids))
    has_experts = bool(arch_of(directory).mixtures)

    def error(logits: Tensor) -> float:
        """Of a token; of the middle one where a rounding error may choose other experts for some."""
        of_tokens = (logits - exact).abs().mean(dim=1)
        return (of_tokens.median() if has_experts else of_tokens.mean()).item()

    theirs = error(transformers_logits(directory, tuple(token_ids), torch.bfloat16))
    # Other experts for an early token change what all later ones attend to; whose products round so, the CPU decides.
    most = 2.5 if has_experts else 1.1
    assert error(Harness(ops, directory, dtype=torch.bfloat16).logits(token_ids)) < most * theirs


@pytest.mark.parametrize("block_size", [1, 16, 64])
def test_block_size_does_not_matter(ops: Ops, checkpoint: Checkpoint, block_size: int) -> None:
    directory, token_ids = checkpoint("qwen3"), prompt(50)
    actual = Harness(ops, directory, block_size=block_size).logits(token_ids)
    assert (actual - transformers_logits(directory, tuple(token_ids))).abs().max().item() < TOLERANCE


def test_longrope_short_factors_serve_engines_that_stay_within_the_original_context(
    ops: Ops, checkpoint: Checkpoint
) -> None:
    directory = checkpoint("phi3", **LONGROPE, original_max_position_embeddings=32)
    token_ids = prompt(32)
    actual = Harness(ops, directory, max_model_len=32).logits(token_ids)
    assert (actual - transformers_logits(directory, tuple(token_ids))).abs().max().item() < TOLERANCE


def test_longrope_long_factors_serve_engines_that_allow_more(ops: Ops, checkpoint: Checkpoint) -> None:
    directory = checkpoint("phi3", **LONGROPE, original_max_position_embeddings=32)
    token_ids = prompt(48)  # transformers looks at the length of the batch, quire at what the engine allows
    actual = Harness(ops, directory, max_model_len=256).logits(token_ids)
    assert (actual - transformers_logits(directory, tuple(token_ids))).abs().max().item() < TOLERANCE


def test_phimoe_scales_its_rotation_by_a_factor_with_a_name_of_its_own(ops: Ops, checkpoint: Checkpoint) -> None:
    parameters = {**LONGROPE["rope_parameters"], "short_mscale": 1.2, "long_mscale": 1.2}
    directory = checkpoint("phimoe", rope_parameters=parameters, original_max_position_embeddings=32)
    token_ids = prompt(32)
    actual = Harness(ops, directory, max_model_len=32).logits(token_ids)
    assert (actual - transformers_logits(directory, tuple(token_ids))).abs().max().item() < TOLERANCE


def test_dynamic_ntk_stretches_to_what_the_engine_allows(ops: Ops, checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama", **rope("dynamic", factor=4.0), max_position_embeddings=64)
    token_ids = prompt(100)
    actual = Harness(ops, directory, max_model_len=100).logits(token_ids)
    assert (actual - transformers_logits(directory, tuple(token_ids))).abs().max().item() < TOLERANCE


def test_bamba_rotates_the_part_that_its_rotation_names(ops: Ops, checkpoint: Checkpoint) -> None:
    """Not a case: transformers reads no such part from beside the rotation, so there is no older spelling."""
    directory = checkpoint("bamba", **rope("default", partial_rotary_factor=0.25))
    token_ids = prompt(40)
    actual = Harness(ops, directory).logits(token_ids)
    assert (actual - transformers_logits(directory, tuple(token_ids))).abs().max().item() < TOLERANCE


def test_kimi_linear_is_read_as_published_and_as_transformers_writes_it(
    ops: Ops, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    written, token_ids = checkpoint("kimi_linear"), prompt(20)
    published, config = tmp_path / "published", json.loads((written / "config.json").read_text())
    shutil.copytree(written, published)
    tensors = load_file(written / "model.safetensors")
    dense = "model.layers.0.{}.down_proj.weight"
    assert dense.format("block_sparse_moe") in tensors
    layer_types, mlp_types = config.pop("layer_types"), config.pop("mlp_layer_types")
    assert mlp_types == ["dense", "sparse", "sparse", "sparse"]
    config["first_k_dense_replace"] = 1
    config["linear_attn_config"] = {
        "full_attn_layers": [number for number, kind in enumerate(layer_types, 1) if kind == "full_attention"],
        "kda_layers": [number for number, kind in enumerate(layer_types, 1) if kind == "linear_attention"],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    (published / "config.json").write_text(json.dumps(config))
    of_dense = re.compile(r"(layers\.0)\.block_sparse_moe\.")
    renamed = {of_dense.sub(r"\1.mlp.", name): value for name, value in tensors.items()}
    assert dense.format("mlp") in renamed
    save_file(renamed, published / "model.safetensors", {"format": "pt"})
    expected = Harness(ops, written).logits(token_ids)
    assert torch.equal(Harness(ops, published).logits(token_ids), expected)
    assert (transformers_logits(published, tuple(token_ids)) - expected).abs().max().item() < TOLERANCE


def test_dory_is_read_as_published(ops: Ops, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """With attention and MLP as layers of their own, as its config counts them."""
    written, token_ids = checkpoint("dory"), prompt(20)
    published = tmp_path / "published"
    shutil.copytree(written, published)
    halves = {"self_attn.": (0, "mixer."), "lambda_1": (0, "attn_alpha")}
    halves |= {"mlp.": (1, "mixer."), "lambda_2": (1, "mlp_alpha")}

    def name(found: re.Match[str]) -> str:
        second, part = halves[found[2]]
        return f"layers.{2 * int(found[1]) + second}.{part}"

    tensors = load_file(written / "model.safetensors")
    of_half = re.compile(rf"layers\.(\d+)\.({'|'.join(map(re.escape, halves))})")
    renamed = {of_half.sub(name, stored): value for stored, value in tensors.items()}
    assert "backbone.layers.7.mixer.suv_up" in renamed
    save_file(renamed, published / "model.safetensors", {"format": "pt"})
    expected = Harness(ops, written).logits(token_ids)
    assert torch.equal(Harness(ops, published).logits(token_ids), expected)
    assert (transformers_logits(published, tuple(token_ids)) - expected).abs().max().item() < TOLERANCE


def test_axk1_is_read_as_published(ops: Ops, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without a bias of the choice of experts, and with a norm behind MLPs that have none."""
    written, token_ids = checkpoint("axk1"), prompt(20)
    published = tmp_path / "published"
    shutil.copytree(written, published)
    tensors = load_file(written / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.endswith("e_score_correction_bias")}
    assert len(kept) < len(tensors)
    kept["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(64)
    save_file(kept, published / "model.safetensors", {"format": "pt"})
    actual = Harness(ops, published).logits(token_ids)
    assert (transformers_logits(published, tuple(token_ids)) - actual).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_exactly(checkpoint: Checkpoint, family: str) -> None:
    from safetensors import safe_open

    for case_family, overrides in CASES.values():
        if case_family == family:
            directory = checkpoint(family, **overrides)
            with safe_open(directory / "model.safetensors", "pt") as file:
                unread = tuple(unread_parts(arch_of(directory)))
                names = [name for name in file.keys() if not DERIVED.search(name)]  # noqa: SIM118
                stored = sum(file.get_tensor(name).numel() for name in names if not name.startswith(unread))
            assert num_parameters(arch_of(directory)) == stored


@pytest.mark.parametrize("wanted", [[8], [0, 8, 14], [3, 14]], ids=str)
@pytest.mark.parametrize(
    "case", ["llama", "qwen3-moe", "gemma2", "gpt2", "falcon", "mamba2", "zamba2", "gemma3n", "gemma4"]
)
def test_rows_that_are_wanted_have_the_bits_that_they_have_among_all(
    ops: Ops, checkpoint: Checkpoint, case: str, wanted: list[int]
) -> None:
    family, overrides = CASES[case]
    harness = Harness(ops, checkpoint(family, **overrides))
    prompts, rows = [prompt(9, seed=1), prompt(6, seed=2)], torch.tensor(wanted)
    whole, some = (harness.inputs([(harness.add(tokens), len(tokens)) for tokens in prompts]) for _ in range(2))
    expected = harness.model.forward(*whole)
    actual = harness.model.forward(some[0], replace(some[1], wanted=rows))
    assert torch.equal(actual if len(actual) == len(wanted) else actual[rows], expected[rows])
    assert (len(actual) == len(wanted)) == (case not in {"falcon", "zamba2", "gemma3n", "gemma4"})
