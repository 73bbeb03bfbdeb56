"""quire: LLM inference and serving. Public names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.beam_search import BeamSearchOutput as BeamSearchOutput
    from quire.beam_search import BeamSearchParams as BeamSearchParams
    from quire.beam_search import BeamSearchSequence as BeamSearchSequence
    from quire.config.flags.args import EngineArgs as EngineArgs
    from quire.engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
    from quire.engine.llm_engine import LLMEngine as LLMEngine
    from quire.inputs import PromptType as PromptType
    from quire.inputs import TextPrompt as TextPrompt
    from quire.inputs import TokensPrompt as TokensPrompt
    from quire.llm import LLM as LLM
    from quire.models.registry import ModelRegistry as ModelRegistry
    from quire.outputs import CompletionOutput as CompletionOutput
    from quire.outputs import Logprob as Logprob
    from quire.outputs import RequestOutput as RequestOutput
    from quire.sampling_params import RequestOutputKind as RequestOutputKind
    from quire.sampling_params import SamplingParams as SamplingParams
    from quire.structured.params import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "AsyncLLMEngine": "quire.engine.async_llm_engine",
    "BeamSearchOutput": "quire.beam_search",
    "BeamSearchParams": "quire.beam_search",
    "BeamSearchSequence": "quire.beam_search",
    "CompletionOutput": "quire.outputs",
    "EngineArgs": "quire.config.flags.args",
    "LLM": "quire.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "Logprob": "quire.outputs",
    "ModelRegistry": "quire.models.registry",
    "PromptType": "quire.inputs",
    "RequestOutput": "quire.outputs",
    "RequestOutputKind": "quire.sampling_params",
    "SamplingParams": "quire.sampling_params",
    "StructuredOutputsParams": "quire.structured.params",
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
}

__all__ = ["__version__", *_HOMES]


def _version() -> str:
    """The version that the build wrote down. A source tree that was never built or installed has none."""
    try:
        version: str = importlib.import_module("quire._version").version
    except ModuleNotFoundError:
        return "0.0"
    return version


__version__ = _version()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
