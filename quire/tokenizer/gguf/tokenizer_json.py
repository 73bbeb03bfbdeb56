"""The `tokenizer.json` that a GGUF file's metadata stands for: byte pairs (`gpt2`) or SentencePiece (`llama`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.config.gguf.end_tokens import TURN_ENDS
from quire.config.gguf.files import read_gguf
from quire.config.gguf.metadata import GgufKeys
from quire.errors import TokenizerError, shown
from quire.log import get_logger
from quire.tokenizer.gguf.pieces import merges_of
from quire.tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from quire.tokenizer.tokenizer_files import DEFAULT_TEMPLATE, TokenizerFiles
from quire.utils.lazy import nearest

log = get_logger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens."""
ROLES: Mapping[str, str] = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",
    "mask": "mask_token",
}
"""Of a token in GGUF (the spelling is its own) -> in tokenizer_config.json."""
SPACE = "\u2581"
OF_PHI3 = "<|placeholder1|>"
"""A token that only Phi-3 has. Its special tokens take the spaces behind them, which no metadata say."""
WITHOUT_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens of Phi-3 that do not."""
TEMPLATE = "tokenizer.chat_template"
_OTHER = "Give the tokenizer of the original model with --tokenizer ORG/NAME or a directory."


def gguf_tokenizer(path: Path) -> tuple[str, TokenizerFiles]:
    """(tokenizer.json, what the files beside it would say) of a GGUF file.

    Raises: TokenizerError for a kind of tokenizer that is not built; CheckpointError for a damaged file.
    """
    keys = GgufKeys(read_gguf(path))
    vocabulary = _vocabulary(keys)
    kind = keys.text("tokenizer.ggml.model")
    if kind == "gpt2":
        built = _byte_pairs(keys, vocabulary)
    elif kind == "llama":
        built = _sentence_pieces(keys, vocabulary)
    else:
        raise TokenizerError(
            f"{path}: tokenizers of the kind {kind!r} (tokenizer.ggml.model) are not built from GGUF; gpt2 and llama "
            f"are. {_OTHER}"
        )
    common = {"version": "1.0", "added_tokens": list(vocabulary.added()), "pre_tokenizer": None, "normalizer": None}
    return json.dumps({**common, **built}, ensure_ascii=False), _files(keys, vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """The tokens of a model."""

    tokens: Sequence[str]
    types: Sequence[int]
    """As many; the normal one where the file says nothing."""
    ids: Mapping[str, int]
    """Of all tokens but those that only fill the embedding up."""
    roles: Mapping[str, int]
    """Name in tokenizer_config.json -> id."""

    def added(self) -> Iterator[dict[str, Any]]:
        """Tokens that are matched in a text before it is cut, as tokenizer.json has them."""
        special, is_phi3 = {*self.roles.values()}, OF_PHI3 in self.ids
        for content, index in self.ids.items():
            kind = self.types[index]
            if kind in (CONTROL, USER_DEFINED, UNKNOWN) or index in special:
                yield {
                    "id": index,
                    "content": content,
                    "special": kind != USER_DEFINED,
                    "normalized": False,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": is_phi3 and content not in WITHOUT_SPACES,
                }


def _vocabulary(keys: GgufKeys) -> _Vocabulary:
    if "tokenizer.ggml.tokens" not in keys.metadata:
        raise TokenizerError(f"{keys.source} has no tokenizer (tokenizer.ggml.tokens). {_OTHER}")
    tokens = keys.texts("tokenizer.ggml.tokens")
    types = keys.numbers("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        keys.refuse("tokenizer.ggml.token_type", f"must have a type for each of {len(tokens)} tokens")
    ids: dict[str, int] = {}
    for index, content in enumerate(tokens):
        if types[index] != UNUSED or content != f"[PAD{index}]":
            ids.setdefault(content, index)
    given = {name: keys.token_id(role) for role, name in ROLES.items()}
    roles = {name: token_id for name, token_id in given.items() if token_id is not None}
    for name, index in roles.items():
        if index >= len(tokens):
            raise TokenizerError(f"{keys.source}: {name} is token {index} of {len(tokens)}. Use another file.")
    kinds = [CONTROL if token in TURN_ENDS else int(kind) for token, kind in zip(tokens, types, strict=True)]
    return _Vocabulary(tokens=tokens, types=kinds, ids=ids, roles=roles)


def _byte_pairs(keys: GgufKeys, vocabulary: _Vocabulary) -> dict[str, Any]:
    """GPT-2's kind: bytes as visible characters."""
    pre = _pre_tokenizer(keys)
    merges = [merge.split(" ", 1) for merge in keys.texts("tokenizer.ggml.merges")]
    known = vocabulary.ids
    wrong = next((merge for merge in merges if len(merge) != 2 or "".join(merge) not in known), None)
    if wrong is not None:
        keys.refuse("tokenizer.ggml.merges", f"must join two tokens to a third each, and has {shown(' '.join(wrong))}")
    return {
        "normalizer": {"type": "NFC"} if pre.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "post_processor": _ends(keys, vocabulary, adds_bos=pre.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _model(known, merges, ignore_merges=pre.whole_words),
    }


def _pre_tokenizer(keys: GgufKeys) -> PreTokenizer:
    name = keys.optional_text("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise TokenizerError(
            f"{keys.source}: texts are cut in the way {name!r} (tokenizer.ggml.pre) before they are tokenised, which "
            f"is not known{nearest(name, list(PRE_TOKENIZERS)) or '.'} Known: {known}. {_OTHER}"
        )
    return PRE_TOKENIZERS[name]


def _sentence_pieces(keys: GgufKeys, vocabulary: _Vocabulary) -> dict[str, Any]:
    """Llama's kind: spaces as a visible character, bytes where there is no piece; the best piece is joined first."""
    scores = keys.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        keys.refuse("tokenizer.ggml.scores", f"must have a score for each of {len(vocabulary.tokens)} tokens")
    prefixed = keys.flag("tokenizer.ggml.add_space_prefix", default=True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    first = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    normal = {text: index for text, index in vocabulary.ids.items() if vocabulary.types[index] == NORMAL}
    unknown = next((text for text, index in vocabulary.ids.items() if vocabulary.types[index] == UNKNOWN), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, replace]},
        "post_processor": _ends(keys, vocabulary, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *last]},
        "model": _model(
            vocabulary.ids, merges_of(normal, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def _model(ids: Mapping[str, int], merges: Sequence[Sequence[str]], **options: Any) -> dict[str, Any]:
    """A `BPE` as tokenizer.json has it."""
    return {"type": "BPE", "vocab": dict(ids), "merges": list(merges), "unk_token": None, **options}


def _ends(keys: GgufKeys, vocabulary: _Vocabulary, *, adds_bos: bool) -> dict[str, Any] | None:
    """What puts tokens around a text, if the model expects them."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    around: list[dict[str, Any]] = [text]
    used: dict[str, Any] = {}
    for role, default, place in (("bos", adds_bos, 0), ("eos", False, len(around) + 1)):
        index = vocabulary.roles.get(f"{role}_token")
        if index is None or not keys.flag(f"tokenizer.ggml.add_{role}_token", default=default):
            continue
        content = vocabulary.tokens[index]
        used[content] = {"id": content, "ids": [index], "tokens": [content]}
        around.insert(place, {"SpecialToken": {"id": content, "type_id": 0}})
    if not used:
        return None
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {"type": "TemplateProcessing", "single": around, "pair": [*around, second], "special_tokens": used}


def _files(keys: GgufKeys, vocabulary: _Vocabulary) -> TokenizerFiles:
    """Roles of tokens, and the chat templates."""
    named = {
        name: AddedToken(vocabulary.tokens[index], special=True, normalized=False)
        for name, index in vocabulary.roles.items()
    }
    return TokenizerFiles(
        directory=Path(keys.source),
        named_tokens=named,
        extra_special_tokens=(),
        added_tokens=(),
        chat_templates=dict(_chat_templates(keys)),
    )


def _chat_templates(keys: GgufKeys) -> Iterator[tuple[str, str]]:
    """(name, source)."""
    for key in keys.metadata:
        if key == TEMPLATE:
            yield DEFAULT_TEMPLATE, keys.text(key)
        elif key.startswith(f"{TEMPLATE}."):
            yield key.removeprefix(f"{TEMPLATE}."), keys.text(key)
