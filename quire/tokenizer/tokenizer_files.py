"""What a model directory says about its tokenizer, read without building one.

Knows the files and their dialects (`tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, chat
template files); knows nothing about encoding. The precedence between files is that of transformers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken

from quire.config.json_file import MAX_JSON_BYTES, check_depth, parse_json, read_bounded
from quire.errors import TokenizerError
from quire.log import get_logger

log = get_logger(__name__)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPACED = ("CodeGen", "Cohere", "GPT2", "GPTNeoX", "Qwen2", "Qwen3_5")
"""How names of tokenizer classes begin that heed `add_prefix_space`, whatever `tokenizer.json` has."""
DEFAULT_TEMPLATE = "default"
MAX_TEXT_BYTES = 256 << 20
"""Of tokenizer.json; the largest known ones have 35 MB."""

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The tokenizer's settings as the directory gives them."""

    directory: Path
    named_tokens: Mapping[str, AddedToken]
    """bos_token, eos_token and so on, and tokens that only this model names (image_token...)."""
    extra_special_tokens: tuple[AddedToken, ...]
    added_tokens: tuple[AddedToken, ...]
    """Tokens the configuration lists by id, in the order of their ids."""
    chat_templates: Mapping[str, str]
    """By name; `default` serves requests without tools and, when there is no `tool_use`, those with tools."""
    adds_space: bool | None = None
    """Whether texts get a space in front where bytes are tokenised; None for what `tokenizer.json` has."""


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Everything next to `tokenizer.json`.

    Raises: TokenizerError naming the file, what is wrong with it, and the remedy.
    """
    config = read_json(directory / "tokenizer_config.json")
    added = _listed_tokens(config, directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config = {**config, **read_json(directory / "special_tokens_map.json")}
    if config.get("split_special_tokens") is True:
        log.warning("%s: split_special_tokens of tokenizer_config.json has no effect: special tokens count", directory)
    specials, extra = _special_tokens(config, directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        added = _legacy_added_tokens(directory, {token.content for token in (*specials.values(), *extra)})
    known = {token.content: token for token in added}
    return TokenizerFiles(
        directory=directory,
        named_tokens={name: known.get(token.content, token) for name, token in specials.items()},
        extra_special_tokens=extra,
        added_tokens=added,
        chat_templates=_chat_templates(directory, config),
        adds_space=_adds_space(config),
    )


def _adds_space(config: Json) -> bool | None:
    wanted = config.get("add_prefix_space")
    return wanted if isinstance(wanted, bool) and str(config.get("tokenizer_class")).startswith(SPACED) else None


def read_json(path: Path) -> Json:
    """The JSON object in `path`; empty when there is no such file.

    Raises: TokenizerError when the file cannot be read or is not a JSON object.
    """
    text = read_text(path, MAX_JSON_BYTES)
    if text is None:
        return {}
    try:
        value = parse_json(text)
        check_depth(value)
    except ValueError as error:
        raise damaged(path, f"it is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(path, f"it holds a {type(value).__name__}, not an object")
    return value


def read_text(path: Path, most_bytes: int = MAX_TEXT_BYTES) -> str | None:
    """The text of `path`, or None when there is no such file.

    Raises: TokenizerError when it is there and cannot be read as UTF-8, or is too long.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise TokenizerError(f"{path} is no regular file. Download the model's tokenizer files again, completely.")
    try:
        data = read_bounded(path, most_bytes)
        return None if data is None else io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise damaged(path, f"byte {error.start} is not valid UTF-8") from error
    except ValueError as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror or error}. Check its permissions.") from error


def damaged(path: Path, problem: str) -> TokenizerError:
    """The error for a file that is there and not what it should be."""
    size = path.stat().st_size if path.is_file() else 0
    return TokenizerError(
        f"{path} ({size} bytes) is damaged: {problem}. Download the model's tokenizer files again, completely."
    )


def _listed_tokens(config: Json, path: Path) -> tuple[AddedToken, ...]:
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise damaged(path, f"added_tokens_decoder is a {type(listed).__name__}, not an object")
    try:
        by_id = sorted((int(token_id), value) for token_id, value in listed.items())
    except (TypeError, ValueError) as error:
        raise damaged(path, f"added_tokens_decoder has a key that is not a token id ({error})") from error
    return tuple(_token(value, f"added_tokens_decoder[{token_id}]", path) for token_id, value in by_id)


def _legacy_added_tokens(directory: Path, special: set[str]) -> tuple[AddedToken, ...]:
    """`added_tokens.json`: content -> id, from before the configuration listed them."""
    listed = read_json(directory / "added_tokens.json")
    return tuple(
        AddedToken(content, normalized=content not in special, special=content in special)
        for content, _ in sorted(listed.items(), key=lambda item: str(item[1]).zfill(12))
    )


def _special_tokens(config: Json, path: Path) -> tuple[dict[str, AddedToken], tuple[AddedToken, ...]]:
    """(tokens with a name, tokens without)."""
    named = {
        name: _token(value, name, path, special=True)
        for name, value in config.items()
        if (name in NAMED_TOKENS and value is not None) or (name.endswith("_token") and isinstance(value, str))
    }
    extra = config.get("extra_special_tokens") or []
    if isinstance(extra, dict):
        named.update({name: _token(value, name, path, special=True) for name, value in extra.items()})
        extra = []
    extra = extra or config.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        raise damaged(path, f"extra_special_tokens is a {type(extra).__name__}, not a list")
    return named, tuple(_token(value, "extra_special_tokens", path, special=True) for value in extra)


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _token(value: object, name: str, path: Path, *, special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise damaged(path, f"{name} is neither a string nor an object with a content")
    flags = {flag: bool(value[flag]) for flag in _FLAGS if flag in value}
    return AddedToken(value["content"], **{**flags, **({"special": True} if special else {})})


def _chat_templates(directory: Path, config: Json) -> dict[str, str]:
    """`chat_template.jinja` and `additional_chat_templates/` first, else the configuration's."""
    found = {path.stem: read_text(path) for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found[DEFAULT_TEMPLATE] = read_text(directory / "chat_template.jinja")
    files = {name: text for name, text in found.items() if text is not None}
    if files:
        return files
    path = directory / "tokenizer_config.json"
    given = config.get("chat_template")
    if given is None:
        return _legacy_chat_template(directory)
    if isinstance(given, str):
        return {DEFAULT_TEMPLATE: given}
    if not isinstance(given, list):
        raise damaged(path, f"chat_template is a {type(given).__name__}, not a string or a list of named templates")
    return dict(_named_template(entry, path) for entry in given)


def _legacy_chat_template(directory: Path) -> dict[str, str]:
    """`chat_template.json`, as processors of multimodal models wrote it."""
    given = read_json(directory / "chat_template.json").get("chat_template")
    return {DEFAULT_TEMPLATE: given} if isinstance(given, str) else {}


def _named_template(entry: object, path: Path) -> tuple[str, str]:
    if isinstance(entry, dict):
        name, template = entry.get("name"), entry.get("template")
        if isinstance(name, str) and isinstance(template, str):
            return name, template
    raise damaged(path, "chat_template holds an entry without a name and a template")
