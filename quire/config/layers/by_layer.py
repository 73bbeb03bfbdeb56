"""What single layers have in place of keys of the config (`per_layer_config`), as transformers 5 writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.config.config_keys import ConfigKeys

BY_LAYER = "per_layer_config"


def by_layer(keys: ConfigKeys, num_layers: int) -> Mapping[int, Mapping[str, Any]] | None:
    """By the numbers of the layers, which are as many digits as the last one's in a config; None without the key.

    Raises: ConfigError.
    """
    written = keys.raw.get(BY_LAYER)
    if written is None:
        return None
    is_known = isinstance(written, Mapping) and all(isinstance(own, Mapping) for own in written.values())
    numbers = [str(number) for number in written] if is_known else []
    if not is_known or not all(number.isdecimal() and int(number) < num_layers for number in numbers):
        problem = f"must have an object for each layer that differs, by its number, which is below {num_layers}"
        keys.refuse(BY_LAYER, written, problem)
    return {int(number): own for number, own in zip(numbers, written.values(), strict=True)}
