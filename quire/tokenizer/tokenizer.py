"""Text to token ids and back, over the `tokenizers` package.

Owns what a token id stands for. Knows no requests: increments of text are `detokenizer`, conversations are `chat`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Protocol

import tokenizers

from quire.config.gguf.files import is_gguf
from quire.errors import InvalidParameter, TokenizerError
from quire.tokenizer.gguf.tokenizer_json import gguf_tokenizer
from quire.tokenizer.sentencepiece import convert_sentencepiece
from quire.tokenizer.tokenizer_files import (
    DEFAULT_TEMPLATE,
    Json,
    TokenizerFiles,
    damaged,
    read_text,
    read_tokenizer_files,
)
from quire.utils.unicode import check_unicode

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Texts are tokenised in the thread that asks, one at a time: the package's own threads would not survive a fork."""
MARK_START, MARK_END = "\ufdd0", "\ufdd1"
"""Unicode noncharacters, reserved for internal use: around special tokens that must (or must not) be taken as such."""

LONG = 256
"""Tokens from which on `decode` lets other threads run meanwhile."""


class Tokenizer(Protocol):
    """What the rest of quire needs of a tokenizer. Implementations are safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the model has one."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Content -> id of the tokens that `skip_special_tokens` leaves out."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of `special_tokens`."""

    @property
    def added_tokens(self) -> Mapping[int, str]:
        """Id -> content of tokens that are matched in the text before the model sees it, special or not."""

    @property
    def byte_ids(self) -> frozenset[int]:
        """Byte fallback: ids that stand for a single byte while all others stand for text; else empty."""

    @property
    def is_byte_level(self) -> bool:
        """Whether `decode` is the concatenation of `token_bytes`, read as UTF-8 with U+FFFD for what is not."""

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token and so on, as chat templates see them."""

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name."""

    @property
    def chat_template(self) -> str | None:
        """The template named `default`."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of a text.

        add_special_tokens puts BOS and the like where the model expects them. parse_special takes special tokens that
        stand in the text for what they are; without it they are text like any other.

        Raises: InvalidParameter for an unpaired surrogate.
        """

    def encode_marked(self, text: str) -> list[int]:
        """The ids of a text in which exactly the special tokens between MARK_START and MARK_END are special."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the token ids; ids without a token give nothing.

        Raises: InvalidParameter for an id that is negative or beyond 32 bits.
        """

    def has_token(self, token_id: int) -> bool:
        """Whether the vocabulary has a token with this id."""

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id without a token."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text that other tokens precede; empty for an id without a token."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory, or of a GGUF file.

    `tokenizer.json` is read directly; a directory that has only a SentencePiece model is converted by transformers.
    Nothing in the directory is executed.

    Raises: TokenizerError naming the file, what is wrong with it and the remedy; MissingDependency.
    """
    if is_gguf(directory):
        built, files = gguf_tokenizer(directory)
        return HFTokenizer(_build(built, directory), files)
    files = read_tokenizer_files(directory)
    path = directory / "tokenizer.json"
    text = read_text(path)
    if text is None:
        text, path = _converted(directory)
    return HFTokenizer(_build(text, path), files)


def _converted(directory: Path) -> tuple[str, Path]:
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (directory / name).is_file():
            if not (directory / name).stat().st_size:
                raise damaged(directory / name, "it is empty")
            return convert_sentencepiece(directory, directory / name), directory / name
    present = sorted(p.name for p in directory.iterdir() if "token" in p.name) if directory.is_dir() else []
    raise TokenizerError(
        f"{directory} has no tokenizer.json and no SentencePiece tokenizer.model"
        f" (tokenizer files there: {', '.join(present) or 'none'}). Download the complete repository, or make"
        " tokenizer.json with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
    )


def _build(text: str, path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises bare Exception for every malformed file
        raise damaged(path, _first_line(error)) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


class HFTokenizer:
    """A tokenizer in the `tokenizer.json` format.

    Where no decoder clean-up is part of `tokenizer.json`, none is done: `clean_up_tokenization_spaces` of
    `tokenizer_config.json` would make the text of a token depend on tokens that are not there yet, and is ignored.
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
        _add_tokens(backend, files)
        _set_space(backend, files.adds_space)
        self._backend = backend
        self._lock = Lock()
        self._marked: tokenizers.Tokenizer | None = None
        self._token_bytes: dict[int, bytes] = {}
        self.directory = files.directory
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_tokens: Mapping[str, int] = {t.content: token_id for token_id, t in added.items() if t.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.named_tokens: Mapping[str, str] = {name: token.content for name, token in files.named_tokens.items()}
        self.chat_templates = files.chat_templates
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError(f"the tokenizer in {files.directory} has an empty vocabulary. Download it again.")
        self.vocab_size = max(vocabulary.values()) + 1
        decoder = _decoder_steps(backend)
        self.is_byte_level = decoder == ["ByteLevel"]
        self.byte_ids = _byte_ids(vocabulary) if "ByteFallback" in decoder else frozenset()

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the model has one."""
        return self._named_id("eos_token")

    @property
    def chat_template(self) -> str | None:
        """The template named `default`."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of a text. See `Tokenizer.encode`."""
        if parse_special or not self._has_special(text):
            return _encode(self._backend, text, add_special_tokens).ids
        encoding = _encode(self._marked_backend(), without_marks(text), False)
        return self._backend.post_process(encoding).ids if add_special_tokens else encoding.ids

    def encode_marked(self, text: str) -> list[int]:
        """The ids of a text in which exactly the special tokens between marks are special."""
        return _encode(self._marked_backend(), text, False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the token ids. See `Tokenizer.decode`."""
        try:
            if len(token_ids) < LONG:
                return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError as error:
            wrong = next(i for i in token_ids if not 0 <= i < 2**32)
            raise InvalidParameter(
                f"token id {wrong} is out of vocabulary (0..{self.vocab_size - 1})", parameter="token_ids"
            ) from error

    def has_token(self, token_id: int) -> bool:
        """Whether the vocabulary has a token with this id."""
        return 0 <= token_id < self.vocab_size and self._backend.id_to_token(token_id) is not None

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id without a token."""
        return (self._backend.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text that other tokens precede; empty for an id without a token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._compute_token_bytes(token_id)
        return known

    def _compute_token_bytes(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if self.is_byte_level:
            return _bytes_of(token)
        if token_id in self.byte_ids:
            return bytes([int(token[3:5], 16)])
        if token_id in self.special_ids or not token:
            return token.encode()
        anchor, before = self._anchor
        return self.decode([anchor, token_id], skip_special_tokens=False)[len(before) :].encode()

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """A token that shows as text, to put before others, and its text."""
        for token_id in range(self.vocab_size):
            if token_id in self.added_tokens or token_id in self.byte_ids:
                continue
            if (text := self.decode([token_id], skip_special_tokens=False)).isalnum():
                return token_id, text
        return 0, self.decode([0], skip_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        content = self.named_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self.special_tokens) or MARK_START in text

    def _marked_backend(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self._marked is None:
                self._marked = _with_marked_specials(self._backend)
            return self._marked


def without_marks(text: str) -> str:
    """The text without MARK_START and MARK_END."""
    return text if text.isascii() else text.replace(MARK_START, "").replace(MARK_END, "")


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
    check_unicode(text, "prompt")
    try:
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]  # `encode` keeps the GIL
    except Exception as error:  # bare Exception is all the package raises: here, for text its model has no token for
        raise InvalidParameter(
            f"this model's tokenizer cannot encode the prompt: {_first_line(error)}. Leave out characters that are not"
            " in its vocabulary.",
            parameter="prompt",
        ) from error


def _add_tokens(backend: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Add what the configuration lists and `tokenizer.json` lacks; tokens with a role become special.

    A token that `tokenizer.json` has keeps its flags there, unless the configuration lists it by id.
    """
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    known = {**present, **{token.content: token for token in files.added_tokens}}
    backend.add_tokens(list(files.added_tokens))
    special = (*files.named_tokens.values(), *files.extra_special_tokens)
    backend.add_special_tokens([known.get(token.content, token) for token in special])


def _set_space(backend: tokenizers.Tokenizer, adds_space: bool | None) -> None:
    """Put a space in front of texts that are cut into bytes, or none. Mutates backend."""
    steps = backend.pre_tokenizer
    if adds_space is None or steps is None:
        return
    parts = [steps]
    if isinstance(steps, tokenizers.pre_tokenizers.Sequence):
        parts = [steps[index] for index in range(len(json.loads(steps.__getstate__())["pretokenizers"]))]
    for part in parts:
        if isinstance(part, tokenizers.pre_tokenizers.ByteLevel):
            part.add_prefix_space = adds_space


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Names of the decoder's parts, in order; parts that only join are left out."""
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())  # its part of tokenizer.json, without the vocabulary
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps if step["type"] != "Fuse"]


_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def _byte_ids(vocabulary: Mapping[str, int]) -> frozenset[int]:
    return frozenset(token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE, after GPT-2's `bytes_to_unicode`: printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any other character is text as it stands."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _with_marked_specials(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer with every special token spelled between marks, so that only marked ones are recognised.

    Ids stay the same: the token is renamed in the vocabulary as well, and merges that would build it are dropped. So
    text that looks like a special token can never become one, whatever the model.
    """
    state = json.loads(backend.to_str())
    pieces = {token if isinstance(token, str) else token[0] for token in state["model"]["vocab"]}
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    letters = {content for content in special & pieces if len(content) == 1}  # ordinary text needs these
    marked = {content: MARK_START + content + MARK_END for content in special - letters}
    state["added_tokens"] = [
        {**token, "content": marked[token["content"]], "normalized": False} if token["special"] else token
        for token in state["added_tokens"]
        if token["content"] not in letters
    ]
    _rename(state["model"], marked)
    state["post_processor"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _rename(model: Json, names: Mapping[str, str]) -> None:
    """Rename tokens of a model's vocabulary. Mutates model."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        model["unk_token"] = names.get(unknown, unknown)
    merges = model.get("merges")
    if isinstance(merges, list):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & names.keys()]
