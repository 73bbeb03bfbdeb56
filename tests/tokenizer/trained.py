"""Small tokenizers of every kind, trained on the spot, and the directories they would come in."""

import json
import tempfile
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.tokenizer.tokenizer import HFTokenizer, load_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It isn't tired!\n\tdef f(x):\n        return x + 1\n",
    "Grüße aus Köln, être ou ne pas être, señor; naïve façade",
    "Привет, мир! Съешь ещё этих мягких французских булок",
    "日本語のテキスト、漢字とカナ。中文字符也在这里",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "안녕하세요 세계 \N{GRINNING FACE}\N{FAMILY} e\N{COMBINING ACUTE ACCENT} 1234567890 བོད་ཡིག",
    "Hello world, hello there, the the  the   two spaces",
]


def train_pieces(directory: Path) -> Path:
    """A SentencePiece model, tokenizer.model, as older llama checkpoints have it."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=450,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return directory / "tokenizer.model"


def _train(backend: Backend, trainer: object) -> Backend:
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def _byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(
        backend,
        trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False),
    )


def _byte_fallback() -> Backend:
    """As llama: spaces as U+2581, a space in front, 256 byte tokens for what the vocabulary lacks."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=260, limit_alphabet=60, special_tokens=SPECIALS, show_progress=False)
    state = json.loads(_train(backend, trainer).to_str())
    pieces = [token for token in state["model"]["vocab"] if token not in SPECIALS]
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    state["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    backend = Backend.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bos = [("<s>", 1)]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=bos)
    return backend


def _byte_fallback_without_prefix() -> Backend:
    """As gemma: no space is put in front, none is taken away."""
    backend = Backend.from_str(_byte_fallback().to_str())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _unigram() -> Backend:
    backend = Backend(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _train(
        backend,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False),
    )


def _wordpiece() -> Backend:
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    return _train(backend, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIALS, show_progress=False))


def _word_end() -> Backend:
    """As CLIP: a suffix ends a word."""
    backend = Backend(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIALS, end_of_word_suffix="</w>", show_progress=False
    )
    return _train(backend, trainer)


def _no_decoder() -> Backend:
    backend = Backend(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return _train(backend, trainers.WordLevelTrainer(special_tokens=SPECIALS, show_progress=False))


BUILDERS = {
    "byte_level": _byte_level,
    "byte_fallback": _byte_fallback,
    "byte_fallback_without_prefix": _byte_fallback_without_prefix,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "word_end": _word_end,
    "no_decoder": _no_decoder,
}
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}


@lru_cache
def backend(kind: str) -> Backend:
    """The tokenizer as its package has it: the reference."""
    return BUILDERS[kind]()


def write_directory(directory: Path, kind: str, **config: object) -> Path:
    """A model directory with the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    backend(kind).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    return directory


@lru_cache
def tokenizer(kind: str) -> HFTokenizer:
    """The same tokenizer, loaded by quire."""
    with tempfile.TemporaryDirectory() as directory:
        loaded = load_tokenizer(write_directory(Path(directory), kind))
    assert isinstance(loaded, HFTokenizer)
    return loaded
