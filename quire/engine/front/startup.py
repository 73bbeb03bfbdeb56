"""From a configuration to what only the front needs: tokenizer and processors."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.config.engine import QuireConfig
from quire.engine.front.input_processor import InputProcessor
from quire.engine.front.output_processor import OutputProcessor
from quire.engine.front.seeds import MakeSeeds, same_seeds
from quire.errors import ConfigError, RequestError, TokenizerError
from quire.log import get_logger
from quire.tokenizer.chat import load_chat_template
from quire.tokenizer.digest import is_template, tokenizer_digest
from quire.tokenizer.tokenizer import Tokenizer, load_tokenizer

log = get_logger(__name__)


@dataclass(slots=True)
class FrontParts:
    """What turns prompts into requests and tokens into text."""

    config: QuireConfig
    tokenizer: Tokenizer | None
    input_processor: InputProcessor
    output_processor: OutputProcessor


def load_front(
    config: QuireConfig, clock: Callable[[], float] = time.monotonic, seeds: MakeSeeds = same_seeds
) -> FrontParts:
    """Tokenizer and processors; no torch. `seeds` says which seeds requests get that bring none.

    Raises: ConfigError and its kin.
    """
    tokenizer = None if config.model_config.skip_tokenizer_init else load_tokenizer(config.model_config.tokenizer_path)
    _check_tokenizer(config, tokenizer)
    template = config.model_config.chat_template
    config = _with_template(config, tokenizer)
    _check_unchanged(config, template)
    return FrontParts(
        config=config,
        tokenizer=tokenizer,
        input_processor=InputProcessor(config, tokenizer, clock, seeds(config.model_config)),
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


def _with_template(config: QuireConfig, tokenizer: Tokenizer | None) -> QuireConfig:
    """The config with the text of the chat template that was asked for, so that its file is read once, and now.

    Raises: ConfigError for a template that cannot be used.
    """
    source = config.model_config.chat_template
    if source is None or tokenizer is None or source in tokenizer.chat_templates:
        return config
    try:
        template = load_chat_template(tokenizer, source)
    except RequestError as error:
        raise ConfigError(f"option chat_template: {error}") from None
    if not is_template(template.source):  # it would be taken for a path again
        return config
    return replace(config, model_config=replace(config.model_config, chat_template=template.source))


def _check_unchanged(config: QuireConfig, source: str | None) -> None:
    """Refuse a tokenizer that is not the one with which the engine started: other fronts have that one.

    Raises: TokenizerError.
    """
    model = config.model_config
    if model.tokenizer_digest and tokenizer_digest(model.tokenizer_path, source) != model.tokenizer_digest:
        raise TokenizerError(
            f"the tokenizer in {model.tokenizer_path}, the chat template or the package tokenizers has changed since "
            "the engine started. Requests could be read in two ways; restart the server"
        )
