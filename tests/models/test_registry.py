"""ModelRegistry: names, paths, classes, entry points, and errors."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from quire.config.families import ARCHITECTURES
from quire.errors import ConfigError
from quire.models import registry
from quire.models.llama import LlamaForCausalLM
from quire.models.registry import ModelRegistry


@pytest.fixture(autouse=True)
def unchanged_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "classes", dict(ModelRegistry.classes))
    monkeypatch.setattr(ModelRegistry.paths, "entries", dict(ModelRegistry.paths.entries))


class MyModel(LlamaForCausalLM):
    """Somebody else's."""


@pytest.mark.parametrize("architecture", ARCHITECTURES.values())
def test_every_family_is_found(architecture: str) -> None:
    assert ModelRegistry.resolve(architecture, source="config.json").__name__ == architecture  # type: ignore[attr-defined]


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
    ModelRegistry.register_model("LlamaForCausalLM", "quire.models.llama:LlamaForCausalLM")
    assert ModelRegistry.resolve("LlamaForCausalLM", source="config.json") is LlamaForCausalLM


def test_entry_points_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("Plugged", f"{__name__}:MyModel", registry.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(registry, "entry_points", points.select)
    assert ModelRegistry.resolve("Plugged", source="config.json") is MyModel
    assert "Plugged" in ModelRegistry.supported()


@pytest.mark.parametrize("path", ["quire.models.llama", ":Name", "module:"])
def test_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:Name"):
        ModelRegistry.register_model("MyModel", path)


def test_unknown_architecture_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelRegistry.resolve("LlamaForCausalLm", source="some/config.json")
    for part in ("some/config.json", "'LlamaForCausalLm'", "did you mean 'LlamaForCausalLM'", "Qwen3ForCausalLM"):
        assert part in caught.value.message
