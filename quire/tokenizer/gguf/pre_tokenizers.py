"""How a text is cut before byte pairs are merged, by the name that GGUF has for it (`tokenizer.ggml.pre`).

The expressions are those of the models' own tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Step = dict[str, Any]
"""A pre-tokenizer as tokenizer.json has it."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"


def _split(expression: str) -> Step:
    """Cut around what matches."""
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _bytes(*, cuts: bool = False) -> Step:
    """Bytes as visible characters; `cuts` cuts as GPT-2 does."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": cuts}


def _digits(*, each: bool) -> Step:
    return {"type": "Digits", "individual_digits": each}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """What is done to a text before pairs are merged."""

    steps: tuple[Step, ...]
    composes: bool = False
    """Characters are composed first (NFC)."""
    whole_words: bool = False
    """A piece that is a token is taken as it is, whatever the merges make of it."""
    adds_bos: bool = False
    """Where the file does not say."""


def _of(*expressions: str, **more: bool) -> PreTokenizer:
    return PreTokenizer(steps=(*map(_split, expressions), _bytes()), **more)


_GPT2 = PreTokenizer(steps=(_bytes(cuts=True),))
_COMPOSED_GPT2 = PreTokenizer(steps=(_bytes(cuts=True),), composes=True)
_DIGITS = PreTokenizer(steps=(_digits(each=True), _bytes(cuts=True)))
_LIKE_LLAMA3 = _of(_LLAMA3, whole_words=True, adds_bos=True)
_FALCON = PreTokenizer(
    steps=(
        {"type": "Punctuation", "behavior": "Contiguous"},
        _bytes(cuts=True),
        _digits(each=False),
        _split("[0-9][0-9][0-9]"),
    )
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LIKE_LLAMA3),
        "smaug-bpe": _of(_LLAMA3, whole_words=True),
        **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), _of(_LLAMA3)),
        "qwen2": _of(_QWEN2, composes=True),
        **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "solar-open"), _of(_QWEN2)),
        "qwen35": _of(_QWEN35, composes=True),
        "seed-coder": _of(_SEED),
        "tekken": _of(_TEKKEN, whole_words=True, adds_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _of(_GPT4O)),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _of(r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3)),
        **dict.fromkeys(("gpt-2", "phi-2", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion"), _GPT2),
        **dict.fromkeys(("olmo", "mpt"), _COMPOSED_GPT2),
        **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
        "command-r": PreTokenizer(steps=_DIGITS.steps, composes=True),
        "falcon": _FALCON,
        "bloom": _of(_BLOOM),
    }
)
"""By GGUF's names. Several names may stand for one kind: llama.cpp tells models apart that have the same."""
