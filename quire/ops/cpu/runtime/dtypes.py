"""torch dtypes and activation names as the library numbers them."""

from __future__ import annotations

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""By `qr_dtype`."""
COMPACT = torch.uint8
"""Of packed weights that hold bfloat16 in 12 bits."""
WEIGHT_DTYPES = {**DTYPES, COMPACT: 5}
TILES = 6
"""Of activations on their way to a linear layer, bfloat16."""
SCALED_DTYPES = {torch.int8: 3, torch.float8_e4m3fn: 4}
"""Of caches whose tokens have scales."""
CACHE_DTYPES = {**DTYPES, **SCALED_DTYPES}
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu": 4, "relu2": 5}
"""By `qr_activation`."""
