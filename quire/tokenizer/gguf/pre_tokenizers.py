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
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that DeepSeek's first tokenizers take for those of words."""
_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
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


def _deepseek(*expressions: str) -> PreTokenizer:
    """Of DeepSeek's first models: digits stand alone."""
    cuts = map(_split, (r"[\r\n]", *expressions, _HAN_AND_HANGUL))
    return PreTokenizer(steps=(*cuts, _digits(each=True), _bytes()))


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
        "deepseek-llm": _deepseek(rf"\s?[{_CASED}]+", rf"\s?[{_PUNCTUATION}]+", r"\s+$"),
        "deepseek-coder": _deepseek(r"\s?\p{L}+", r"\s?\p{P}+"),
        **dict.fromkeys(("gpt-2", "phi-2", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion"), _GPT2),
        **dict.fromkeys(("olmo", "mpt"), _COMPOSED_GPT2),
        **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS),
        "command-r": PreTokenizer(steps=_DIGITS.steps, composes=True),
        "falcon": _FALCON,
        "bloom": _of(_BLOOM),
    }
)
"""By GGUF's names. Several names may stand for one kind: llama.cpp tells models apart that have the same."""
