"""The families of models that run, as their specs describe them: quire's own, and those of installed packages.

`quire models` prints them. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from quire.config import families
from quire.config.arch import ModelArch
from quire.config.families import ARCHITECTURES, CLASS_GROUP, SPEC_GROUP
from quire.config.family_spec import DECODER, FamilySpec
from quire.config.layers.layer_kinds import all_full
from quire.config.layers.mixers import LatentAttentionSpec
from quire.config.layers.recurrent import no_recurrence
from quire.errors import ConfigError

SAMPLE: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 2**18,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
    }
)
"""The sizes of a model; what else a family's config has is left at the family's defaults."""


class FamilyKind(StrEnum):
    """What distinguishes the layers of a family most."""

    DENSE = "dense"
    EXPERTS = "mixture of experts"
    LATENT = "latent attention"
    """With or without mixtures of experts."""
    COMPRESSED = "compressed attention"
    """With mixtures of experts."""
    RECURRENT = "recurrent layers"
    """All of them, or most, beside attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the list."""

    architecture: str
    model_type: str | None
    """None where a package reads configs of any model_type."""
    name: str
    about: str
    """How it differs from Llama, or from another family."""
    kind: FamilyKind | None
    """None where only a config tells."""
    has_windows: bool
    """Whether layers can have a sliding window."""
    has_own_class: bool
    """Whether a class computes it that is not the common decoder."""
    refused: tuple[str, ...]
    """Keys of config.json whose effect is not computed."""
    package: str
    """Who brings it: quire, a distribution, or "registered" by the running program."""
    problem: str = ""
    """Why it cannot be used."""


def catalogue() -> list[Family]:
    """Every family known: quire's own by model_type, then others by architecture. Imports the specs of plug-ins."""
    registered = families.registered()
    own = [_shipped(model_type) for model_type, name in sorted(ARCHITECTURES.items()) if name not in registered]
    others = [_family(name, spec, None, package="registered") for name, spec in registered.items()]
    others += [_of_entry_point(entry_point) for entry_point in _entry_points({*registered, *ARCHITECTURES.values()})]
    return [*own, *sorted(others, key=lambda family: family.architecture)]


def kind_of(arch: ModelArch) -> FamilyKind:
    """The kind of a model."""
    if arch.recurrences:
        return FamilyKind.RECURRENT
    if any(isinstance(mixer, LatentAttentionSpec) for mixer in arch.mixers):
        return FamilyKind.LATENT
    if arch.family.compressed is not None:
        return FamilyKind.COMPRESSED
    return FamilyKind.EXPERTS if arch.mixtures else FamilyKind.DENSE


def _shipped(model_type: str) -> Family:
    module = families.module_of(model_type)
    return _family(ARCHITECTURES[model_type], module.SPEC, module.__doc__, model_type=model_type)


def _entry_points(known: set[str]) -> list[EntryPoint]:
    """Those of installed packages for other architectures; a spec counts before a class."""
    found = {point.name: point for group in (CLASS_GROUP, SPEC_GROUP) for point in entry_points(group=group)}
    return [point for name, point in found.items() if name not in known]


def _of_entry_point(entry_point: EntryPoint) -> Family:
    package = entry_point.dist.name if entry_point.dist is not None else "unknown"
    if entry_point.group == CLASS_GROUP:  # not loaded: classes import torch
        return _family(entry_point.name, None, None, package=package)
    try:
        spec = families.family_of(entry_point.name, "")
        doc = import_module(entry_point.module).__doc__
    except Exception as error:  # of somebody else's module
        reason = error.message if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return _family(entry_point.name, None, None, package=package, problem=reason)
    return _family(entry_point.name, spec, doc, package=package)


def _family(
    architecture: str,
    spec: FamilySpec | None,
    doc: str | None,
    *,
    model_type: str | None = None,
    package: str = "quire",
    problem: str = "",
) -> Family:
    """A row from a spec, None for a class without one, and the docstring of its module, "Name: how it differs."."""
    name, about = _described(doc)
    sample = None if spec is None else _sample(architecture)
    return Family(
        architecture=architecture,
        model_type=model_type,
        name=name or model_type or architecture,
        about=about if spec is not None or problem else "a class of its own, planned and read as a relative of Llama",
        kind=None if spec is None else _kind(spec, sample),
        has_windows=spec is not None and _has_windows(spec, sample),
        has_own_class=not problem and (spec is None or spec.model_class != DECODER),
        refused=() if spec is None else tuple(spec.refused),
        package=package,
        problem=problem,
    )


def _described(doc: str | None) -> tuple[str, str]:
    """(name, how it differs) of the first sentence of a docstring; the former is empty where no colon follows it."""
    sentence = " ".join((doc or "").split()).partition(". ")[0].removesuffix(".")
    name, colon, about = sentence.partition(": ")
    return (name, about) if colon else ("", sentence)


def _kind(spec: FamilySpec, sample: ModelArch | None) -> FamilyKind | None:
    """Of a model that leaves all but its sizes at the family's defaults."""
    if spec.recurrent is not no_recurrence:
        return FamilyKind.RECURRENT
    if spec.compressed is not None:
        return FamilyKind.COMPRESSED
    return None if sample is None else kind_of(sample)


def _has_windows(spec: FamilySpec, sample: ModelArch | None) -> bool:
    latents = [mixer for mixer in sample.mixers if isinstance(mixer, LatentAttentionSpec)] if sample else []
    if any(mixer.window is not None for mixer in latents):
        return True
    return spec.layer_kinds is not all_full or spec.compressed is not None


def _sample(architecture: str) -> ModelArch | None:
    """A model of common sizes; None where only a config tells what a family's models are."""
    for sizes in (SAMPLE, {**SAMPLE, "num_key_value_heads": 1}):  # some families have more of them in some layers
        raw = {"model_type": architecture, "architectures": [architecture], **sizes}
        try:
            return ModelArch.from_config(raw, source=architecture)
        except ConfigError:
            continue
    return None
