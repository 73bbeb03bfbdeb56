"""Which architecture a config.json names, and whether quire has a family for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys
from quire.config.families import ALSO_CALLED, ARCHITECTURES, check_model_type, check_supported, is_known
from quire.config.quantized.config import read_quantization
from quire.config.text_part import text_part
from quire.errors import ConfigError


def identify(raw: Mapping[str, Any], source: str, *, is_checked: bool = False) -> tuple[str, str]:
    """The architecture and the model_type of a parsed config.json, if quire runs such models (or `is_checked` says so).

    Raises: ConfigError. That a model is not supported comes before anything that is wrong with its config.
    """
    unknown = None if is_checked else why_unknown(raw, source)
    if unknown is not None:
        raise unknown
    model_type = _model_type(raw, source)
    architecture = _architecture(raw, source, model_type)
    read_quantization(raw, source)
    return architecture, model_type


def why_unknown(raw: Mapping[str, Any], source: str) -> ConfigError | None:
    """Why no family is that of a parsed config.json; None where there is one, whatever else is wrong with it.

    Raises: ConfigError for a model for text and images whose language model does not run by itself.
    """
    raw = text_part(raw, source)
    model_type, named = raw.get("model_type"), names_of(raw)
    try:
        if named and not any(map(is_known, named)):
            check_supported(named[0], source=source, raw=raw)
        if not named and isinstance(model_type, str) and model_type:
            check_model_type(model_type, source=source, raw=raw)
    except ConfigError as error:
        return error
    return None


def names_of(raw: Mapping[str, Any]) -> list[str]:
    """The class names that a config gives."""
    listed = raw.get("architectures")
    names = listed if isinstance(listed, list) else [listed]
    return [ALSO_CALLED.get(name, name) for name in names if isinstance(name, str)]


def _model_type(raw: Mapping[str, Any], source: str) -> str:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        ConfigKeys(raw, source).refuse("model_type", model_type, "must name the model family, such as 'llama'")
    return model_type


def _architecture(raw: Mapping[str, Any], source: str, model_type: str) -> str:
    listed = raw.get("architectures")
    if listed is None:
        return ARCHITECTURES[model_type]
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], str):
        ConfigKeys(raw, source).refuse("architectures", listed, "must list exactly one class name")
    return ALSO_CALLED.get(listed[0], listed[0])
