import json
import sys
from pathlib import Path

import pytest

from quire.errors import MissingDependency, TokenizerError
from quire.tokenizer.detokenizer import Detokenizer
from quire.tokenizer.tokenizer import load_tokenizer
from tests.tokenizer.trained import TEXTS, train_pieces


@pytest.fixture(scope="module")
def sentencepiece_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as older llama checkpoints have it: tokenizer.model and no tokenizer.json."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    train_pieces(directory)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "legacy": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_a_sentencepiece_model_is_converted(sentencepiece_directory: Path) -> None:
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_directory / "tokenizer.model"))
    ours = load_tokenizer(sentencepiece_directory)
    assert ours.vocab_size == theirs.vocab_size()
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
        detokenizer = Detokenizer(ours, [])
        assert "".join(detokenizer.append([i]) for i in ids) + detokenizer.finish() == text


def test_without_transformers_the_extra_to_install_is_named(
    sentencepiece_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependency, match=r'pip install "quire\[sentencepiece\]"'):
        load_tokenizer(sentencepiece_directory)


@pytest.mark.parametrize("data", [b"", b"not a model at all", b"\x0a\xff\xff\xff\xff\x0f", 0.5, 0.97])
def test_a_damaged_sentencepiece_model_is_named(
    data: bytes | float, sentencepiece_directory: Path, tmp_path: Path
) -> None:
    whole = (sentencepiece_directory / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data if isinstance(data, bytes) else whole[: int(len(whole) * data)])
    config = (sentencepiece_directory / "tokenizer_config.json").read_bytes()
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model .*(cannot be converted|is damaged: it is empty)"):
        load_tokenizer(tmp_path)


def test_a_model_that_is_cut_behind_a_piece_is_named(sentencepiece_directory: Path, tmp_path: Path) -> None:
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    whole = ModelProto.FromString((sentencepiece_directory / "tokenizer.model").read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(ModelProto(pieces=whole.pieces[:20]).SerializeToString())
    config = (sentencepiece_directory / "tokenizer_config.json").read_bytes()
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(TokenizerError, match="cannot be converted: it ends behind 20 pieces"):
        load_tokenizer(tmp_path)


def test_code_that_comes_with_a_tokenizer_is_not_run(sentencepiece_directory: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_directory / "tokenizer.model").read_bytes())
    config = {"tokenizer_class": "Trap", "auto_map": {"AutoTokenizer": ["trap.Trap", "trap.Trap"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    trap = f"open({str(tmp_path / 'sprung')!r}, 'w').close()\nclass Trap:\n    pass\n"
    (tmp_path / "trap.py").write_text(trap, encoding="utf-8")
    with pytest.raises(TokenizerError):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "sprung").exists()
