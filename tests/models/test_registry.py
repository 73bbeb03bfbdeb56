"""ModelRegistry: names, paths, classes, entry points, and errors."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

from quire.config import families
from quire.config.arch import ModelArch
from quire.config.families import ARCHITECTURES
from quire.config.family_spec import FamilySpec, Norms, Scales, WeightNames, plain
from quire.config.memory.weights.shapes import num_parameters
from quire.config.memory.weights.sizes import weight_bytes
from quire.errors import ConfigError
from quire.loader.load import load_model
from quire.models import registry
from quire.models.decoder import DecoderForCausalLM
from quire.models.registry import ModelRegistry
from tests.config.test_weight_shapes import tensors_of
from tests.ops.implementations import REFERENCE


@pytest.fixture(autouse=True)
def unchanged_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "classes", dict(ModelRegistry.classes))
    monkeypatch.setattr(ModelRegistry.paths, "entries", dict(ModelRegistry.paths.entries))
    monkeypatch.setattr(families, "_registered", {})


class MyModel(DecoderForCausalLM):
    """Somebody else's."""


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_family_is_found(model_type: str) -> None:
    spec = families.family_of(ARCHITECTURES[model_type], model_type)
    assert spec.architecture == ARCHITECTURES[model_type]
    resolved = ModelRegistry.resolve(spec.architecture, source="config.json")
    assert f"{resolved.__module__}:{resolved.__name__}" == spec.model_class  # type: ignore[attr-defined]


def test_registered_class_is_found() -> None:
    ModelRegistry.register_model("MyModel", MyModel)
    assert ModelRegistry.resolve("MyModel", source="config.json") is MyModel
    assert "MyModel" in ModelRegistry.supported()


def test_registered_path_is_imported_when_used() -> None:
    ModelRegistry.register_model("MyModel", f"{__name__}:MyModel")
    assert ModelRegistry.resolve("MyModel", source="config.json") is MyModel


def test_later_registration_replaces() -> None:
    ModelRegistry.register_model("LlamaForCausalLM", MyModel)
    assert ModelRegistry.resolve("LlamaForCausalLM", source="config.json") is MyModel
    ModelRegistry.register_model("LlamaForCausalLM", "quire.models.decoder:DecoderForCausalLM")
    assert ModelRegistry.resolve("LlamaForCausalLM", source="config.json") is DecoderForCausalLM


def test_entry_points_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("Plugged", f"{__name__}:MyModel", families.CLASS_GROUP)])
    monkeypatch.setattr(registry, "entry_points", points.select)
    monkeypatch.setattr(families, "entry_points", points.select)
    assert ModelRegistry.resolve("Plugged", source="config.json") is MyModel
    assert "Plugged" in ModelRegistry.supported()


@pytest.mark.parametrize("path", ["quire.models.decoder", ":Name", "module:"])
def test_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:Name"):
        ModelRegistry.register_model("MyModel", path)


def test_an_unknown_architecture_is_told_the_nearest_and_where_the_known_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelRegistry.resolve("LlamaForCausalLm", source="some/config.json")
    for part in ("some/config.json", "'LlamaForCausalLm'", "did you mean 'LlamaForCausalLM'", "`quire models`"):
        assert part in caught.value.message


NEIGHBOURS = FamilySpec(
    spellings={"hidden_size": "width", "num_hidden_layers": "depth"},
    defaults={"hidden_act": "silu", "num_attention_heads": 2, "max_position_embeddings": 64},
    rotates_pairs=True,
    mlp=plain(True),
    names=WeightNames(base="net", layers="blocks", up="wide", down="narrow"),
)
"""A dialect of its own: neither the keys nor the weights are called as in any family of quire."""
SPELLED = {"model_type": "mine", "architectures": ["Mine"], "vocab_size": 40, "width": 16, "depth": 2}


def arch_of(config: dict[str, object]) -> ModelArch:
    return ModelArch.from_config(config, source="config.json")


def check_plug_in() -> None:
    """Runs without a class of its own, and takes the bytes that are planned."""
    arch = arch_of(SPELLED)
    assert (arch.hidden_size, arch.num_layers, arch.layers[0].mlp.kind) == (16, 2, "plain")
    model = load_model(Path(), arch, ops=REFERENCE, dtype=torch.float32, max_model_len=64, load_format="dummy")
    assert isinstance(model, DecoderForCausalLM)
    loaded = sum(tensor.nbytes for tensor in tensors_of(model))
    assert loaded == weight_bytes(arch, "float32", ops=REFERENCE.name)
    # Embedding and head, and of each layer: q, k, v, o; up, down and their biases; two norms. Then the last norm.
    assert num_parameters(arch) == 2 * 40 * 16 + 2 * (4 * 16 * 16 + 2 * 64 * 16 + 64 + 16 + 2 * 16) + 16


def test_a_spec_alone_makes_a_family() -> None:
    with pytest.raises(ConfigError, match="'Mine' is not supported"):
        arch_of(SPELLED)
    ModelRegistry.register_model("Mine", NEIGHBOURS)
    check_plug_in()


def test_a_spec_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("Mine", f"{__name__}:NEIGHBOURS", families.SPEC_GROUP)])
    monkeypatch.setattr(families, "entry_points", points.select)
    monkeypatch.setattr(registry, "entry_points", points.select)
    check_plug_in()


def test_a_class_may_bring_its_spec() -> None:
    ModelRegistry.register_model("Mine", MyModel, spec=NEIGHBOURS)
    assert arch_of(SPELLED).hidden_size == 16
    assert ModelRegistry.resolve("Mine", source="config.json", family=arch_of(SPELLED).family) is MyModel


def test_an_entry_point_that_gives_no_spec_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("Mine", f"{__name__}:SPELLED", families.SPEC_GROUP)])
    monkeypatch.setattr(families, "entry_points", points.select)
    with pytest.raises(ConfigError, match="gives no FamilySpec"):
        arch_of(SPELLED)


@pytest.mark.parametrize(
    "spec",
    [
        FamilySpec(is_parallel=True, norms=Norms(post_mlp="behind")),
        FamilySpec(is_parallel=True, scales=lambda keys: Scales(residual=0.5)),
        FamilySpec(head_bias=True, scales=lambda keys: Scales(logits=0.5)),
    ],
)
def test_a_spec_that_the_decoder_does_not_compute_is_refused(spec: FamilySpec) -> None:
    ModelRegistry.register_model("Mine", spec)
    config = {**SPELLED, "hidden_size": 16, "num_hidden_layers": 2, "hidden_act": "silu"}
    with pytest.raises(ConfigError, match="needs a class"):
        arch_of({**config, "num_attention_heads": 2, "max_position_embeddings": 64})
