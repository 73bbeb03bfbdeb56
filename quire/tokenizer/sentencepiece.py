"""Models that come with a SentencePiece file only: converted once, at load, by transformers."""

from __future__ import annotations

from pathlib import Path

from quire.errors import MissingDependency, TokenizerError


def convert_sentencepiece(directory: Path, model: Path) -> str:
    """The `tokenizer.json` text that transformers makes of a directory with a SentencePiece model.

    Raises: MissingDependency without the `sentencepiece` extra; TokenizerError when it cannot be converted.
    """
    try:
        from sentencepiece import sentencepiece_model_pb2  # the conversion needs it, too; here its absence is named
        from transformers import AutoTokenizer  # 3 s and 390 MiB, only for these directories
    except ImportError as error:
        raise MissingDependency(
            f"{model} is a SentencePiece model without a tokenizer.json, and converting it needs the package"
            f' {error.name!r}: pip install "quire[sentencepiece]"'
        ) from error
    try:
        parsed = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
        if not parsed.HasField("trainer_spec"):  # it is behind the pieces
            raise ValueError(f"it ends behind {len(parsed.pieces)} pieces")
        converted = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        return str(converted.backend_tokenizer.to_str())
    except Exception as error:  # whatever a foreign converter raises means the same here
        detail = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise TokenizerError(
            f"{model} ({model.stat().st_size} bytes) cannot be converted: {detail}. Check that the file is complete and"
            " that tokenizer_config.json names its tokenizer_class, or provide a tokenizer.json."
        ) from error
