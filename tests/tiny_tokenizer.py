"""The byte-level tokenizer of the tiny checkpoints, with a chat template."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

EOS_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (EOS_TOKEN, "<|im_start|>", "<|im_end|>")
MERGES = ("\u0120 t", "h e", "\u0120t he", "i n", "e r", "o n", "a n", "\u0120 a", "r e", "\u0120 s", "\u00c3 \u00a9")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: ids 0-255 are bytes (in the alphabet's order), then SPECIAL_TOKENS, then MERGES."""
    (directory / "tokenizer.json").write_text(_tokenizer_json())
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": EOS_TOKEN,
                "bos_token": None,
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": 256,
                "clean_up_tokenization_spaces": False,
            }
        )
    )


@cache
def _tokenizer_json() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS, *("".join(pair) for pair in pairs)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer.to_str()
