"""Who builds a model: quire, or transformers those that quire does not have. Imports transformers only for those."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from quire.config.arch import ModelArch, refuse_quantization
from quire.config.gguf.files import is_gguf
from quire.config.identify import identify, names_of, why_unknown
from quire.config.quantized.find import weights_in
from quire.config.quantized.stored import Header
from quire.config.text_part import text_part
from quire.config.unknown import purpose_of
from quire.errors import CheckpointError, ConfigError, MissingDependency
from quire.loader.gguf.names import read_gguf_tensors
from quire.loader.headers import header_of, read_headers
from quire.loader.unread import is_unread
from quire.log import get_logger

log = get_logger(__name__)

INSTALL = 'pip install "quire[transformers]"'


def read_model_arch(raw: Mapping[str, Any], directory: Path, impl: str = "auto") -> ModelArch:
    """The model of a directory; `impl` says who builds it: "quire", "transformers", or whoever can ("auto").

    Raises: ConfigError and its kin.
    """
    source = str(directory if is_gguf(directory) else directory / "config.json")
    text = text_part(raw, source)
    if text is not raw:
        log.warning("%s is for text and images: its language model runs by itself source=%s", names_of(raw)[0], source)
    raw = text
    unknown = why_unknown(raw, source)
    if not _is_foreign(raw, unknown, impl):
        return with_stored_formats(ModelArch.from_config(raw, source=source), directory)
    refuse_quantization(raw, source)
    try:
        arch = cast(ModelArch, _importing("quire.loader.fallback", unknown).read_stored_arch(raw, directory))
    except ConfigError as error:
        raise _both(unknown, error) from None
    _announce(arch, is_known=unknown is None)
    return arch


def with_stored_formats(arch: ModelArch, directory: Path) -> ModelArch:
    """The model with what the headers of its files say of quantised weights.

    Raises: CheckpointError for files that are missing or damaged.
    """
    if arch.quantization is None:
        return arch
    if is_gguf(directory):
        headers = {name: Header(info.dtype, info.shape) for name, info in read_gguf_tensors(directory).items()}
    else:
        headers = {name: header_of(info) for name, info in read_headers(directory).items()}
    candidates = weights_in(headers.items(), rounds=arch.quantization.rounds)
    names = dict.fromkeys(name for name in candidates if not is_unread(name, arch))
    found = (arch.quantization.find(name, headers.get) for name in names)
    formats = tuple(format for format in found if format is not None)
    if not formats and not is_gguf(directory) and arch.quantization.quantizes_weights:
        method = arch.quantization.method
        log.warning("no weight is quantised, though config.json says %s source=%s", method, arch.source)
    return replace(arch, quantized=formats)


def check_runs(raw: Mapping[str, Any], source: str) -> None:
    """Refuse a model that nobody can build, before its weights are there.

    Raises: ConfigError and its kin.
    """
    raw = text_part(raw, source)
    unknown = why_unknown(raw, source)
    if not _is_foreign(raw, unknown, "auto"):
        identify(raw, source)
        return
    refuse_quantization(raw, source)
    try:
        _importing("quire.models.fallback.config", unknown).describe(raw, source)
    except ConfigError as error:
        raise _both(unknown, error) from None


def _is_foreign(raw: Mapping[str, Any], unknown: ConfigError | None, impl: str) -> bool:
    """Raises: ConfigError for a model that continues no texts, and where only quire's own may run for any other."""
    name = next(iter(names_of(raw)), str(raw.get("model_type")))
    if unknown is not None and (impl == "quire" or purpose_of(raw, name)):
        raise unknown
    return unknown is not None or impl == "transformers"


def _importing(module: str, unknown: ConfigError | None) -> ModuleType:
    """Raises: MissingDependency without transformers."""
    if find_spec("transformers") is not None:
        return importlib.import_module(module)
    if unknown is None:
        raise MissingDependency(f"model_impl='transformers' needs the package 'transformers': {INSTALL}")
    raise MissingDependency(f"{unknown.message} Most other decoders run through transformers: {INSTALL}")


def _both(unknown: ConfigError | None, error: ConfigError) -> ConfigError:
    """Why neither quire nor transformers builds a model; what is wrong with its weights stands alone."""
    if unknown is None or isinstance(error, (CheckpointError, MissingDependency)):
        return error
    return ConfigError(f"{unknown.message} Nor does it run through transformers: {error.message}")


def _announce(arch: ModelArch, *, is_known: bool) -> None:
    assert arch.stored is not None
    reason = "as model_impl='transformers' asks" if is_known else "which quire has no family for"
    log.warning(
        "%s, %s, runs through transformers %s: slower, and its tokens may change with what else runs (row_invariant: "
        "false)",
        arch.architecture,
        reason,
        arch.stored.transformers,
    )
    if "auto_map" in arch.raw:
        log.warning("config.json names code of its own (auto_map); quire never runs it source=%s", arch.source)
