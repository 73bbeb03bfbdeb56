"""`ModelRegistry`: architecture name in config.json -> what runs it, loaded when it is used.

A package adds its own with `ModelRegistry.register_model`, or with entry points whose name is the architecture: one in
the group `quire.families` whose value is "module:SPEC", and, only where the decoder cannot compute the model, one in
the group `quire.models` whose value is "module:Class".
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, ClassVar, cast

from quire.config import families
from quire.config.families import CLASS_GROUP
from quire.config.family_spec import FamilySpec
from quire.log import get_logger
from quire.utils.lazy import LazyTable

if TYPE_CHECKING:
    from quire.models.interfaces import ModelClass  # imports torch

log = get_logger(__name__)


class ModelRegistry:
    """The models this process can run."""

    paths: ClassVar[LazyTable] = LazyTable("architecture", {})
    classes: ClassVar[dict[str, ModelClass]] = {}

    @classmethod
    def register_model(
        cls, architecture: str, model: str | FamilySpec | ModelClass, *, spec: FamilySpec | None = None
    ) -> None:
        """Add a model, or replace one.

        `model` is the `FamilySpec` of a model that the decoder computes; else the class that computes it, or
        "package.module:Class", which is imported when it is used. A class whose config.json is no dialect that quire
        reads brings a `spec`, too.
        Raises: ConfigError for a path of another form.
        """
        cls.classes.pop(architecture, None)
        cls.paths.entries.pop(architecture, None)
        families.register(architecture, model if isinstance(model, FamilySpec) else spec)
        if isinstance(model, str):
            cls.paths.add(architecture, model)
        elif not isinstance(model, FamilySpec):
            cls.classes[architecture] = model

    @classmethod
    def supported(cls) -> list[str]:
        """The architectures known, entry points of installed packages included."""
        return families.supported()

    @classmethod
    def resolve(cls, architecture: str, *, source: str, family: FamilySpec | None = None) -> ModelClass:
        """The class for an architecture that `source` names; `family` is what its config.json was read as.

        Raises: ConfigError listing the known ones, and the one that a slip is near to.
        """
        if architecture in cls.classes:
            return cls.classes[architecture]
        if architecture in cls.paths:
            return cast("ModelClass", cls.paths.load(architecture))
        families.check_supported(architecture, source=source)
        for entry_point in (
            () if families.is_shipped(architecture) else entry_points(group=CLASS_GROUP, name=architecture)
        ):
            log.info("model from a plug-in architecture=%s value=%s", architecture, entry_point.value)
            return cast("ModelClass", entry_point.load())
        path = (family or families.family_of(architecture, "")).model_class
        return cast("ModelClass", LazyTable("model class", {architecture: path}).load(architecture))
