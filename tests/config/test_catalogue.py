"""The list of families: what it says is what specs and configs say."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from quire.config import catalogue, families
from quire.config.arch import ModelArch
from quire.config.catalogue import Family, FamilyKind, kind_of
from quire.config.families import ARCHITECTURES, CLASS_GROUP, SPEC_GROUP
from quire.config.family_spec import DECODER, FamilySpec, plain
from quire.config.layers.layer_kinds import all_sliding
from quire.models.registry import ModelRegistry
from tests.contracts.test_imports import modules_after
from tests.family_configs import FAMILIES

SPEC = FamilySpec(defaults={"hidden_act": "gelu", "sliding_window": 16}, layer_kinds=all_sliding, mlp=plain(True))


def found() -> dict[str, Family]:
    return {family.architecture: family for family in catalogue.catalogue()}


shipped = cache(found)
"""What is found where nothing is registered."""


@pytest.fixture(autouse=True)
def unchanged_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRegistry, "classes", dict(ModelRegistry.classes))
    monkeypatch.setattr(ModelRegistry.paths, "entries", dict(ModelRegistry.paths.entries))
    monkeypatch.setattr(families, "_registered", {})


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_family_is_described(model_type: str) -> None:
    """The docstring of its module is "Name: how it differs."; its spec has defaults for what a config may leave out."""
    family = shipped()[ARCHITECTURES[model_type]]
    assert (family.model_type, family.package, family.problem) == (model_type, "quire", "")
    assert family.name != model_type
    assert len(family.about) > 10
    assert family.kind is not None


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_kind_is_that_of_its_models(model_type: str) -> None:
    from transformers import AutoConfig

    architecture = ARCHITECTURES[model_type]
    raw = AutoConfig.for_model(model_type, **FAMILIES[model_type]).to_dict()
    arch = ModelArch.from_config({**raw, "architectures": [architecture]}, source="")
    family = shipped()[architecture]
    assert kind_of(arch) == family.kind
    assert family.has_windows or all(mixer.window is None for mixer in arch.attentions)
    assert family.has_own_class == (arch.family.model_class != DECODER)


def test_a_registered_spec_is_listed() -> None:
    ModelRegistry.register_model("MineForCausalLM", SPEC)
    family = found()["MineForCausalLM"]
    assert (family.model_type, family.package, family.kind) == (None, "registered", FamilyKind.DENSE)
    assert (family.has_windows, family.has_own_class) == (True, False)


def test_a_replaced_family_is_listed_once() -> None:
    ModelRegistry.register_model("LlamaForCausalLM", SPEC)
    assert [family.package for family in catalogue.catalogue() if family.architecture == "LlamaForCausalLM"] == [
        "registered"
    ]


def test_a_class_without_a_spec_is_listed_without_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    plugged(monkeypatch, EntryPoint("TheirsForCausalLM", "no_such_package:Class", CLASS_GROUP))
    family = found()["TheirsForCausalLM"]
    assert (family.kind, family.has_own_class, family.problem) == (None, True, "")
    assert "relative of Llama" in family.about


@pytest.mark.parametrize(
    ("value", "problem"),
    [("no_such_package:SPEC", "No module named 'no_such_package'"), (f"{__name__}:found", "gives no FamilySpec")],
)
def test_a_plug_in_that_is_broken_says_why_and_harms_no_other(
    value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugged(monkeypatch, EntryPoint("TheirsForCausalLM", value, SPEC_GROUP))
    families._plugged.cache_clear()
    assert problem in found()["TheirsForCausalLM"].problem
    assert found()["LlamaForCausalLM"].problem == ""


def plugged(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    for module in (families, catalogue):
        monkeypatch.setattr(module, "entry_points", EntryPoints(points).select)


def test_the_list_needs_no_torch() -> None:
    code = "from quire.config.catalogue import catalogue\ncatalogue()"
    loaded: set[Any] = modules_after(code)
    assert loaded.isdisjoint({"torch", "transformers", "numpy"})
