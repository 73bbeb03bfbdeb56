"""The digest of a tokenizer's files: fronts that take over from each other must have the same. Builds no tokenizer."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from quire.config.gguf.files import is_gguf, read_gguf

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"


def tokenizer_digest(directory: Path, chat_template: str | None = None) -> str:
    """SHA-256, in hexadecimal, over name, size and bytes of each of the files that is there, and what reads them.

    `chat_template` is what the option of that name says: a template, its file, or the name of one of the model's.
    """
    contents = {"header": _gguf_header(directory)} if is_gguf(directory) else _contents(directory)
    if chat_template is not None:
        content = None if is_template(chat_template) else _content(Path(chat_template))
        contents["the option"] = chat_template.encode("utf-8", "surrogatepass") if content is None else content
    digest = hashlib.sha256(f"tokenizers {metadata.version('tokenizers')}\0".encode())
    for name, content in contents.items():
        if content is not None:
            digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
            digest.update(content)
    return digest.hexdigest()


def _contents(directory: Path) -> dict[str, bytes | None]:
    """Name -> bytes of the files that a directory may have."""
    files = [directory / name for name in FILES]
    files += sorted((directory / TEMPLATES).glob("*.jinja"))
    return {str(file.relative_to(directory)): _content(file) for file in files}


def _gguf_header(file: Path) -> bytes:
    """Metadata and tensor infos of a GGUF model, the tokenizer's among them. Raises: CheckpointError."""
    header = read_gguf(file).headers[0]
    with header.file.open("rb") as stream:
        return stream.read(header.num_bytes)


def is_template(option: str) -> bool:
    """Whether an option's value is a template as it stands: a path has none of the characters every template has."""
    return any(character in option for character in "{}\n")


def _content(file: Path) -> bytes | None:
    """None for what is not there or cannot be read: whoever loads the tokenizer says what is wrong with it."""
    try:
        return file.read_bytes() if file.is_file() else None
    except (OSError, ValueError):
        return None
