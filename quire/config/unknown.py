"""What is said of a model that quire does not run: what it is, which known one may be meant, and what would work."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError, shown

SUFFIX = "forcausallm"
NEAR = 0.88
"""Similarity of two stems that differ by a slip; Mamba is not Llama."""
PURPOSES: Mapping[str, str] = MappingProxyType(
    {
        "ForMaskedLM": "fills gaps in texts",
        "ForSequenceClassification": "classifies texts",
        "ForTokenClassification": "labels the words of texts",
        "ForQuestionAnswering": "finds answers in texts",
        "ForMultipleChoice": "chooses between texts",
        "ForImageClassification": "classifies images",
        "ForObjectDetection": "finds objects in images",
        "ForImageTextToText": "reads images",
        "ForCTC": "transcribes speech",
        "ForSpeechSeq2Seq": "transcribes speech",
        "ForConditionalGeneration": "reads its input with an encoder",
        "LMHeadModel": "",  # continues texts
        "Model": "has no head that predicts tokens",
    }
)
"""Ending of a class's name in transformers -> what such models do instead of continuing a text."""
HOW = (
    "`quire models` lists the families that run. A package can add one with ModelRegistry.register_model or entry "
    "points in the groups 'quire.families' and 'quire.models' (docs/adding_a_model.md)."
)


def refusal(
    raw: Mapping[str, Any], name: str, *, key: str, source: str, known: Iterable[str], relative: str | None = None
) -> ConfigError:
    """The error for a config whose `key` ("architecture" or "model_type") is `name`, which quire does not run.

    `known` are the values of the key that run; `relative` is the architecture that has the config's model_type.
    """
    purpose = purpose_of(raw, name)
    sentences = (
        _what(name, key, purpose, known),
        "Its code is in its repository (auto_map), and quire never runs that." if raw.get("auto_map") else "",
        _same_as(relative, raw) if relative and not purpose else "",
        "Use a checkpoint of an architecture that `quire models` lists." if purpose else HOW,
    )
    return ConfigError(f"{source}: {' '.join(filter(None, sentences))}")


def purpose_of(raw: Mapping[str, Any], name: str) -> str:
    """What a model does that does not continue texts; empty for one that does, or where its name does not tell."""
    code = raw.get("auto_map")
    if isinstance(code, Mapping) and "AutoModelForCausalLM" in code:
        return ""  # a class of the repository, whose name follows no rule
    if raw.get("is_encoder_decoder") is True:
        return "reads its input with an encoder"
    return next((purpose for suffix, purpose in PURPOSES.items() if name.endswith(suffix)), "")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs by a slip, if there is one. A relative, such as the next version, is none."""
    stem = _stem(name)
    return next((other for other in known if _is_near(_stem(other), stem)), None)


def _what(name: str, key: str, purpose: str, known: Iterable[str]) -> str:
    if purpose:
        return f"the {key} {shown(name)} is not supported: it {purpose}, and quire runs models that continue texts."
    near = nearest_name(name, known)
    return f"the {key} {shown(name)} is not supported{f'; did you mean {near!r}?' if near else '.'}"


def _same_as(relative: str, raw: Mapping[str, Any]) -> str:
    return (
        f"If it computes what {relative} does, whose model_type {shown(raw.get('model_type'))} it has, run its "
        f'directory with --hf-overrides \'{{"architectures": ["{relative}"]}}\'.'
    )


def _stem(name: str) -> str:
    return name.lower().removesuffix(SUFFIX)


def _is_near(known: str, stem: str) -> bool:
    if known != stem and (stem.startswith(known) or known.startswith(stem)):
        return False  # Gemma3n is a relative of Gemma3
    if known != stem and _without_digits(known) == _without_digits(stem):
        return False  # and so is Starcoder3 of Starcoder2
    return difflib.SequenceMatcher(None, known, stem).ratio() >= NEAR


def _without_digits(text: str) -> str:
    return re.sub(r"\d", "", text)
