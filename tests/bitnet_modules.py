"""transformers' linear layers for ternary weights, without the compiler that their functions are decorated with."""

import pytest

with pytest.MonkeyPatch.context() as _patch:
    _patch.setenv("TORCHDYNAMO_DISABLE", "1")
    from transformers.integrations.bitnet import (
        AutoBitLinear,
        BitLinear,
        WeightQuant,
        pack_weights,
        replace_with_bitnet_linear,
    )

__all__ = ["AutoBitLinear", "BitLinear", "WeightQuant", "pack_weights", "replace_with_bitnet_linear"]
