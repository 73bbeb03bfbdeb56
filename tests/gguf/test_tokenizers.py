"""Tokenizers from GGUF files give the tokens of the tokenizers that they were written from."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend

from quire.config.gguf.config_json import gguf_generation_config
from quire.engine.core_startup import EMBEDDED_MODEL
from quire.errors import TokenizerError
from quire.tokenizer.digest import tokenizer_digest
from quire.tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS
from quire.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.gguf.files import add_byte_pairs
from tests.tokenizer.trained import TEXTS, train_pieces, write_directory

PIECES = [
    *TEXTS,
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "'LL",
    "12345",
    "<|im_start|>",
    "e\u0301",
    "\u00bd",
    "_x_",
    "...",
]
PROMPTS = [*TEXTS, "", " ", "\n\n", "a<|im_start|>user\nhi<|im_end|>\n", "tail  ", "  head", "\u0000\u0007"]


def texts(count: int = 150) -> list[str]:
    """The prompts, and random ones made of parts of them."""
    rng = random.Random(5)
    parts = [[_part(rng) for _ in range(rng.randrange(1, 6))] for _ in range(count)]
    return [*PROMPTS, *("".join(chosen) for chosen in parts)]


def _part(rng: random.Random) -> str:
    piece = rng.choice(PIECES)
    start = rng.randrange(len(piece))
    return piece[start : start + rng.randrange(1, 20)]


def finish(writer: gguf.GGUFWriter, file: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_pairs(directory: Path, source: Path, pre: str = "gpt-2", **keys: Any) -> Path:
    """A GGUF file with the tokenizer of a directory; `keys` are further ones of the tokenizer."""
    writer = gguf.GGUFWriter(directory / "t.gguf", "llama")
    add_byte_pairs(writer, source, pre)
    for name, value in keys.items():
        kind = gguf.GGUFValueType.BOOL if isinstance(value, bool) else gguf.GGUFValueType.UINT32
        writer.add_key_value(f"tokenizer.ggml.{name}", value, kind)
    return finish(writer, directory / "t.gguf")


def same(ours: Tokenizer, theirs: Any) -> None:
    """Every text has the same tokens, and they the same text."""
    for text in texts():
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_byte_pairs_equal_the_tokenizer_json_that_they_came_from(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "source", "byte_level", chat_template="{{ messages }}{{ bos_token }}")
    ours, theirs = load_tokenizer(byte_pairs(tmp_path, source)), load_tokenizer(source)
    same(ours, theirs)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.special_tokens == theirs.special_tokens
    assert ours.chat_template == theirs.chat_template
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.is_byte_level
    assert [ours.token_bytes(index) for index in range(ours.vocab_size)] == [
        theirs.token_bytes(index) for index in range(ours.vocab_size)
    ]


CLASSES = {
    "gpt-2": ("GPT2Tokenizer", {}),
    "qwen2": ("Qwen2Tokenizer", {}),
    "qwen35": ("Qwen3_5Tokenizer", {}),
    "command-r": ("CohereTokenizer", {"bos_token": None, "eos_token": None, "add_bos_token": False}),
}
"""Kinds that transformers builds in code."""


@pytest.mark.parametrize("pre", CLASSES)
def test_texts_are_cut_as_transformers_cuts_them(pre: str, tmp_path: Path) -> None:
    """With the embedded model's vocabulary, each kind of cuts gives other tokens."""
    import transformers

    described = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())["model"]
    name, options = CLASSES[pre]
    try:
        theirs_class = getattr(transformers, name)
    except AttributeError:
        pytest.skip(f"this transformers has no {name}")
    special = {f"{role}_token": "<|endoftext|>" for role in ("unk", "bos", "eos", "pad")}
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in described["merges"]]
    theirs = theirs_class(vocab=described["vocab"], merges=merges, **{**special, **options})
    ours = load_tokenizer(byte_pairs(tmp_path, EMBEDDED_MODEL, pre))
    for text in texts():
        if "<|" in text:  # which tokens are special is not of the class
            continue
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), repr(text)


_DEEPSEEK = ["Don", "'", "t", " go", ",", " HE", "'", "LL", " pay", " ", *"12345", "..", "\n", "\n", "  ", " end"]
CUTS = {
    "gpt-2": ["Don", "'t", " go", ",", " HE", "'", "LL", " pay", " 12345", "..", "\n", "\n", "  ", " end"],
    "llama-bpe": ["Don", "'t", " go", ",", " HE", "'LL", " pay", " ", "123", "45", "..\n\n", "  ", " end"],
    "qwen2": ["Don", "'t", " go", ",", " HE", "'LL", " pay", " ", *"12345", "..\n\n", "  ", " end"],
    "starcoder": ["Don", "'t", " go", ",", " HE", "'", "LL", " pay", " ", *"12345", "..", "\n", "\n", "  ", " end"],
    "gpt-4o": ["Don't", " go", ",", " HE'LL", " pay", " ", "123", "45", "..\n\n", "  ", " end"],
    "tekken": ["Don", "'t", " go", ",", " HE", "'LL", " pay", " ", *"12345", "..\n\n", "  ", " end"],
    "deepseek-coder": _DEEPSEEK,
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": ["Don", "'t", " go", ",", " HE", "'LL", " pay", " ", "123", "45", "..\n\n", "  ", " end"],
}
"""Where each kind cuts, as its expression says."""


@pytest.mark.parametrize("pre", CUTS)
def test_each_kind_cuts_where_it_should(pre: str) -> None:
    state = {"model": {"type": "BPE", "vocab": {}, "merges": []}, "version": "1.0", "added_tokens": []}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[pre].steps)}
    cutter = Backend.from_str(json.dumps(state)).pre_tokenizer
    text = "Don't go, HE'LL pay 12345..\n\n   end"
    pieces = [text[begin:end] for _, (begin, end) in cutter.pre_tokenize_str(text)]
    assert "".join(pieces) == text
    if pre in ("gpt-2", "starcoder"):  # GPT-2's cuts leave line ends to the spaces behind them
        pieces = [piece for piece in pieces if piece.strip()]
        assert pieces == [piece for piece in CUTS[pre] if piece.strip()]
    else:
        assert pieces == CUTS[pre]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_kind_loses_nothing(pre: str, tmp_path: Path) -> None:
    ours = load_tokenizer(byte_pairs(tmp_path, EMBEDDED_MODEL, pre))
    composes = PRE_TOKENIZERS[pre].composes
    for text in TEXTS:
        back = ours.decode(ours.encode(text, add_special_tokens=False))
        assert back == text or (composes and "e\u0301" in text)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_bos_and_eos_are_added_where_the_file_says_so(pre: str, tmp_path: Path) -> None:
    plain = load_tokenizer(byte_pairs(tmp_path, EMBEDDED_MODEL, pre))
    bos, eos = plain.bos_token_id, plain.eos_token_id
    body = plain.encode("hello", add_special_tokens=False)
    assert plain.encode("hello") == ([bos, *body] if pre == "llama-bpe" else body)
    both = load_tokenizer(byte_pairs(tmp_path, EMBEDDED_MODEL, pre, add_bos_token=True, add_eos_token=True))
    assert both.encode("hello") == [bos, *body, eos]
    none = load_tokenizer(byte_pairs(tmp_path, EMBEDDED_MODEL, pre, add_bos_token=False))
    assert none.encode("hello") == body


def test_tokens_that_end_a_turn_end_generation(tmp_path: Path) -> None:
    file = byte_pairs(tmp_path, EMBEDDED_MODEL, eot_token_id=3)
    tokens = load_tokenizer(file)
    expected = [tokens.eos_token_id, 3, tokens.special_tokens["<|endoftext|>"]]
    assert gguf_generation_config(file) == {"eos_token_id": expected}


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user-defined"])
def test_an_end_of_turn_is_a_control_token_whatever_the_file_calls_it(kind: int, pieces: Path, tmp_path: Path) -> None:
    """Files of ChatML with SentencePiece call theirs user-defined."""
    file = sentence_pieces(tmp_path / "t.gguf", pieces, ("<|im_start|>", "<|im_end|>"), kinds=(4, kind))
    tokens = load_tokenizer(file)
    end = tokens.vocab_size - 1
    assert gguf_generation_config(file) == {"eos_token_id": [tokens.eos_token_id, end]}
    assert tokens.encode("a<|im_end|>", add_special_tokens=False)[-1] == end
    assert end in tokens.special_ids
    assert end not in tokens.encode("a<|im_end|>", parse_special=False)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model, as older llama checkpoints have it."""
    return train_pieces(tmp_path_factory.mktemp("pieces"))


def sentence_pieces(
    file: Path, model: Path, added: Sequence[str] = (), kinds: Sequence[int] = (), **flags: bool
) -> Path:
    """A GGUF file with a SentencePiece model, and tokens behind it: control tokens, unless `kinds` says otherwise."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    size = range(theirs.vocab_size())
    own = [2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in size]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(theirs.id_to_piece(i) for i in size), *added])
    writer.add_token_scores([*(theirs.get_score(i) for i in size), *[-1000.0] * len(added)])
    writer.add_token_types([*own, *(kinds or [3] * len(added))])
    writer.add_bos_token_id(theirs.bos_id())
    writer.add_eos_token_id(theirs.eos_id())
    writer.add_unk_token_id(theirs.unk_id())
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    return finish(writer, file)


def test_sentence_pieces_equal_the_library(pieces: Path, tmp_path: Path) -> None:
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    ours = load_tokenizer(sentence_pieces(tmp_path / "t.gguf", pieces))
    assert ours.vocab_size == theirs.vocab_size()
    for text in texts():
        if not text or "\u0000" in text:
            continue
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text), repr(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.encode(text) == [theirs.bos_id(), *ids]


def test_without_a_space_in_front_texts_begin_as_they_are(pieces: Path, tmp_path: Path) -> None:
    """As Gemma."""
    ours = load_tokenizer(sentence_pieces(tmp_path / "t.gguf", pieces, add_space_prefix=False, add_bos_token=False))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert not ours.token(ids[0]).startswith("\u2581")


@pytest.mark.parametrize("is_phi3", [True, False])
def test_special_tokens_of_phi_3_take_the_spaces_behind_them(is_phi3: bool, pieces: Path, tmp_path: Path) -> None:
    """As its tokenizer.json has them, and llama.cpp by the model's name. Those of other models do not."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    added = ("<|endoftext|>", "<|assistant|>", "<|placeholder1|>" if is_phi3 else "<|extra|>", "<|end|>", "<|user|>")
    file = sentence_pieces(tmp_path / "t.gguf", pieces, added, add_bos_token=False)
    first, tokens = theirs.vocab_size(), load_tokenizer(file)
    end_of_text, assistant, _, end, user = range(first, first + len(added))
    lines = [] if is_phi3 else [theirs.encode("\n")]
    assert tokens.encode("<|user|>\nquick fox<|end|>\n<|assistant|>\n") == [
        user,
        *theirs.encode("quick fox" if is_phi3 else "\nquick fox"),
        end,
        *itertools.chain(*lines),
        assistant,
        *itertools.chain(*lines),
    ]
    assert tokens.encode("<|endoftext|>\n") == [end_of_text, *theirs.encode("\n")]


@pytest.mark.parametrize(
    ("pre", "model", "expected"),
    [
        ("secret-bpe", "gpt2", r"'secret-bpe' \(tokenizer\.ggml\.pre\).*Known: .*qwen2.*--tokenizer ORG/NAME"),
        ("default", "gpt2", r"'default' \(tokenizer\.ggml\.pre\).*--tokenizer"),
        ("llama", "bert", r"of the kind 'bert' .*gpt2 and llama are"),
    ],
)
def test_what_is_not_known_is_named(pre: str, model: str, expected: str, tmp_path: Path) -> None:
    file = byte_pairs(tmp_path, EMBEDDED_MODEL, pre)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0" + model.encode()))
    with pytest.raises(TokenizerError, match=expected):
        load_tokenizer(file)


def test_a_file_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    file = finish(gguf.GGUFWriter(tmp_path / "t.gguf", "llama"), tmp_path / "t.gguf")
    with pytest.raises(TokenizerError, match=r"has no tokenizer.*--tokenizer ORG/NAME"):
        load_tokenizer(file)


def test_the_digest_of_a_tokenizer_is_that_of_the_header(tmp_path: Path) -> None:
    file = byte_pairs(tmp_path, EMBEDDED_MODEL)
    before = tokenizer_digest(file)
    assert tokenizer_digest(file) == before
    byte_pairs(tmp_path, EMBEDDED_MODEL, "qwen2")
    assert tokenizer_digest(file) != before
