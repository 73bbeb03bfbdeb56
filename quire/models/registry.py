"""`ModelRegistry`: architecture name in config.json -> model class, loaded when it is used.

A package adds its own with `ModelRegistry.register_model`, or with an entry point in the group `quire.models` whose
name is the architecture and whose value is "module:Class".
"""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar, cast

from quire.errors import ConfigError
from quire.log import get_logger
from quire.utils.lazy import LazyTable

if TYPE_CHECKING:
    from quire.models.interfaces import ModelClass  # imports torch

log = get_logger(__name__)

ENTRY_POINT_GROUP = "quire.models"
SUFFIX = "forcausallm"
NEAR = 0.88
"""Similarity of two stems that differ by a slip; Mamba is not Llama, and Gemma4 is not Gemma3."""


class ModelRegistry:
    """The models this process can run."""

    paths: ClassVar[LazyTable] = LazyTable(
        "architecture",
        {
            "Ernie4_5ForCausalLM": "quire.models.ernie4_5:Ernie4_5ForCausalLM",
            "Gemma2ForCausalLM": "quire.models.gemma2:Gemma2ForCausalLM",
            "Gemma3ForCausalLM": "quire.models.gemma3:Gemma3ForCausalLM",
            "GemmaForCausalLM": "quire.models.gemma:GemmaForCausalLM",
            "Glm4ForCausalLM": "quire.models.glm4:Glm4ForCausalLM",
            "GlmForCausalLM": "quire.models.glm:GlmForCausalLM",
            "GPT2LMHeadModel": "quire.models.gpt2:GPT2LMHeadModel",
            "HeliumForCausalLM": "quire.models.helium:HeliumForCausalLM",
            "LlamaForCausalLM": "quire.models.llama:LlamaForCausalLM",
            "MinistralForCausalLM": "quire.models.ministral:MinistralForCausalLM",
            "MistralForCausalLM": "quire.models.mistral:MistralForCausalLM",
            "MixtralForCausalLM": "quire.models.mixtral:MixtralForCausalLM",
            "OPTForCausalLM": "quire.models.opt:OPTForCausalLM",
            "Phi3ForCausalLM": "quire.models.phi3:Phi3ForCausalLM",
            "Qwen2ForCausalLM": "quire.models.qwen2:Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM": "quire.models.qwen2:Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM": "quire.models.qwen3:Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM": "quire.models.qwen3:Qwen3MoeForCausalLM",
            "SeedOssForCausalLM": "quire.models.seed_oss:SeedOssForCausalLM",
            "SmolLM3ForCausalLM": "quire.models.smollm3:SmolLM3ForCausalLM",
        },
    )
    classes: ClassVar[dict[str, ModelClass]] = {}

    @classmethod
    def register_model(cls, architecture: str, model: str | ModelClass) -> None:
        """Add a model, or replace one: "package.module:Class" (imported when it is used) or the class itself.

        Raises: ConfigError for a path of another form.
        """
        if isinstance(model, str):
            cls.paths.add(architecture, model)
            cls.classes.pop(architecture, None)
        else:
            cls.classes[architecture] = model

    @classmethod
    def supported(cls) -> list[str]:
        """The architectures known, entry points of installed packages included."""
        return sorted({*cls.paths, *cls.classes, *entry_points(group=ENTRY_POINT_GROUP).names})

    @classmethod
    def resolve(cls, architecture: str, *, source: str) -> ModelClass:
        """The class for an architecture that `source` names.

        Raises: ConfigError listing the known ones, and the one that a slip is near to.
        """
        if architecture in cls.classes:
            return cls.classes[architecture]
        if architecture in cls.paths:
            return cast("ModelClass", cls.paths.load(architecture))
        for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=architecture):
            log.info("model from a plug-in architecture=%s value=%s", architecture, entry_point.value)
            return cast("ModelClass", entry_point.load())
        raise cls._unknown(architecture, source)

    @classmethod
    def check(cls, architecture: str, *, source: str) -> None:
        """Refuse an unknown architecture without importing anything.

        Raises: ConfigError listing the known ones, and the one that a slip is near to.
        """
        if architecture not in cls.supported():
            raise cls._unknown(architecture, source)

    @classmethod
    def _unknown(cls, architecture: str, source: str) -> ConfigError:
        known = cls.supported()
        stem = architecture.lower().removesuffix(SUFFIX)
        hint = next((name for name in known if _is_near(name.lower().removesuffix(SUFFIX), stem)), None)
        return ConfigError(
            f"{source}: the architecture {architecture!r} is not supported"
            f"{f'; did you mean {hint!r}?' if hint else '.'} Supported: {', '.join(known)}. "
            "Others can be added with ModelRegistry.register_model or an entry point in the group "
            f"{ENTRY_POINT_GROUP!r}."
        )


def _is_near(known: str, stem: str) -> bool:
    if known != stem and (stem.startswith(known) or known.startswith(stem)):
        return False  # Gemma3n is a relative of Gemma3
    return difflib.SequenceMatcher(None, known, stem).ratio() >= NEAR
