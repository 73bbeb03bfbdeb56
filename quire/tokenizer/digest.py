"""The digest of a tokenizer's files: fronts that take over from each other must have the same. Builds no tokenizer."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

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
    files = [directory / name for name in FILES]
    files += sorted((directory / TEMPLATES).glob("*.jinja"))
    contents = {str(file.relative_to(directory)): _content(file) for file in files}
    if chat_template is not None:
        content = None if is_template(chat_template) else _content(Path(chat_template))
        contents["the option"] = chat_template.encode("utf-8", "surrogatepass") if content is None else content
    digest = hashlib.sha256(f"tokenizers {metadata.version('tokenizers')}\0".encode())
    for name, content in contents.items():
        if content is not None:
            digest.update(f"{name}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
            digest.update(content)
    return digest.hexdigest()


def is_template(option: str) -> bool:
    """Whether an option's value is a template as it stands: a path has none of the characters every template has."""
    return any(character in option for character in "{}\n")


def _content(file: Path) -> bytes | None:
    """None for what is not there or cannot be read: whoever loads the tokenizer says what is wrong with it."""
    try:
        return file.read_bytes() if file.is_file() else None
    except (OSError, ValueError):
        return None
