"""Which words of `quire run` are the model and the prompt, and the line that says which model answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from quire.config.flags.args import EMBEDDED
from quire.errors import ConfigError, InvalidParameter
from quire.loader.names import hub_name, names_a_model


def take_words(args: argparse.Namespace, words: Sequence[str]) -> str | None:
    """The prompt among the words, None when there is none. Sets `args.model` when a word names it.

    Raises: ConfigError when the model is given twice; InvalidParameter for more than two words.
    """
    given = vars(args).get("model")
    if len(words) > 2:
        raise InvalidParameter(
            f"got {len(words)} words, and at most a model and a prompt are taken; put the prompt in quotation marks",
            parameter="prompt",
        )
    if len(words) == 2 and given is not None:
        raise ConfigError(f"the model is given twice: {words[0]!r} and --model {given!r}; give one")
    is_named = len(words) == 2 or (len(words) == 1 and given is None and _is_model(words[0]))
    if is_named:
        args.model = words[0]
    rest = words[1:] if is_named else words
    return rest[0] if rest else None


def _is_model(word: str) -> bool:
    return word == EMBEDDED or names_a_model(word)


def answering(args: argparse.Namespace) -> str:
    """The line that says which model answers."""
    name = vars(args).get("model")
    if name is None:
        return f"model: {EMBEDDED} (embedded; name another one first: quire run MODEL PROMPT)"
    meant = str(hub_name(name) or name)
    return f"model: {name}" + ("" if meant == name else f" ({meant})")
