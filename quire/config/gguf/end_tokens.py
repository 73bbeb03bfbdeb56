"""The tokens that end a text or a turn, from the metadata of a GGUF file."""

from __future__ import annotations

from quire.config.gguf.metadata import GgufKeys

ROLES = ("eos", "eot", "eom")
"""Ends of a text, a turn and a message."""
TURN_ENDS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
    }
)
"""Tokens that end a turn of the models that have them, although many files name one end alone. They are control tokens,
although some files call them user-defined or normal ones."""
HARMONY = frozenset({"<|return|>", "<|call|>"})
"""Where there are these (gpt-oss), <|end|> ends a message, and others follow."""


def end_token_ids(keys: GgufKeys) -> list[int]:
    """The one that the file names as the end of text first."""
    named = [token_id for role in ROLES if (token_id := keys.token_id(role)) is not None]
    return list(dict.fromkeys([*named, *_turn_ends(keys)]))


def _turn_ends(keys: GgufKeys) -> list[int]:
    """Tokens that are known to end a turn."""
    if "tokenizer.ggml.tokens" not in keys.metadata:
        return []
    tokens = keys.texts("tokenizer.ggml.tokens")
    found = [(index, token) for index, token in enumerate(tokens) if token in TURN_ENDS]
    ends = TURN_ENDS - {"<|end|>"} if {token for _, token in found} >= HARMONY else TURN_ENDS
    return [index for index, token in found if token in ends]
