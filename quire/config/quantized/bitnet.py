"""What a quantization_config of BitNet says: how ternary weights are stored, or which are rounded when read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from quire.config.quantized.find import Hints, is_named
from quire.config.quantized.keys import Keys
from quire.config.quantized.stored import Packing

_PACKINGS: Mapping[tuple[str, str], Packing] = MappingProxyType(
    {
        ("bitlinear", "offline"): Packing.BITLINEAR,
        ("bitlinear", "online"): Packing.BITLINEAR,
        ("autobitlinear", "offline"): Packing.AUTOBITLINEAR,
        ("autobitlinear", "online"): Packing.ROUNDED,
    }
)
"""(linear_class, quantization_mode); BitLinear is packed in either mode, as in transformers."""
_MODULE = re.compile(r"\w+(\.\w+)*")
HEAD = "lm_head"


def read_bitnet(keys: Keys) -> tuple[Packing, Hints]:
    """How all ternary weights are stored, and which are not.

    Raises: ConfigError for norms in front of products, for patterns, and for a head that is to be rounded.
    """
    linear_class = keys.text("linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = keys.text("quantization_mode", ("offline", "online"), "offline")
    keys.refuse_any(("use_rms_norm",), "models without norms in each linear layer (use_rms_norm)")
    modules = keys.given.get("modules_to_not_convert")
    is_list = isinstance(modules, list) and all(isinstance(name, str) and _MODULE.fullmatch(name) for name in modules)
    if modules is not None and not is_list:
        keys.refuse("modules_to_not_convert", "a list of names of modules, without patterns")
    packing = _PACKINGS[linear_class, mode]
    if packing is Packing.ROUNDED and modules is not None and not is_named(HEAD, modules):
        keys.refuse("modules_to_not_convert", f"heads that are not rounded: null, or a list with {HEAD}")
    return packing, Hints(not_rounded=tuple(modules or ()))
