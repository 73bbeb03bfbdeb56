"""From a configuration to what only the front needs: tokenizer and processors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.config.engine import QuireConfig
from quire.engine.input_processor import InputProcessor
from quire.engine.output_processor import OutputProcessor
from quire.errors import ConfigError, RequestError
from quire.log import get_logger
from quire.tokenizer.chat import load_chat_template
from quire.tokenizer.tokenizer import Tokenizer, load_tokenizer

log = get_logger(__name__)


@dataclass(slots=True)
class FrontParts:
    """What turns prompts into requests and tokens into text."""

    config: QuireConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    output_processor: OutputProcessor


def load_front(config: QuireConfig, clock: Callable[[], float] = time.monotonic) -> FrontParts:
    """Tokenizer and processors; no torch.

    Raises: ConfigError and its kin.
    """
    tokenizer = None if config.model_config.skip_tokenizer_init else load_tokenizer(config.model_config.tokenizer_path)
    _check_tokenizer(config, tokenizer)
    _check_chat_template(config, tokenizer)
    return FrontParts(
        config=config,
        tokenizer=tokenizer,
        input_processor=InputProcessor(config, tokenizer, clock),
        output_processor=OutputProcessor(tokenizer),
    )


def _check_tokenizer(config: QuireConfig, tokenizer: Tokenizer | None) -> None:
    """Ids the tokenizer can produce must have a row in the embedding, or the first use of one would fail.

    Padding and other tokens that were added without growing the model are common: a prompt that uses one is refused.
    """
    vocab_size = config.model_config.arch.vocab_size
    if tokenizer is None or tokenizer.vocab_size <= vocab_size:
        return
    beyond = sorted(text for token_id, text in tokenizer.added_tokens.items() if token_id >= vocab_size)
    if tokenizer.vocab_size - len(beyond) <= vocab_size:
        log.warning("no embedding for %s; prompts that hold them are refused", ", ".join(map(repr, beyond)))
    else:
        raise ConfigError(
            f"the tokenizer in {config.model_config.tokenizer_path} has ids up to {tokenizer.vocab_size - 1}, but the "
            f"model's vocabulary has {vocab_size} entries; it belongs to another model. "
            "Give the model's own tokenizer files."
        )


def _check_chat_template(config: QuireConfig, tokenizer: Tokenizer | None) -> None:
    """A template that was asked for is tried now, not when the first conversation comes."""
    source = config.model_config.chat_template
    if source is not None and tokenizer is not None:
        try:
            load_chat_template(tokenizer, source)
        except RequestError as error:
            raise ConfigError(f"option chat_template: {error}") from None
