"""One row per way in which a checkpoint of a family can differ."""

from __future__ import annotations

from typing import Any

from tests.models.cases.compressed import COMPRESSED
from tests.models.cases.dense import DENSE
from tests.models.cases.experts import EXPERTS
from tests.models.cases.latent import LATENT
from tests.models.cases.recurrent import RECURRENT
from tests.models.cases.unlike_llama import UNLIKE_LLAMA
from tests.models.cases.windows import WINDOWS

CASES: dict[str, tuple[str, dict[str, Any]]] = (
    DENSE | WINDOWS | UNLIKE_LLAMA | EXPERTS | LATENT | COMPRESSED | RECURRENT
)
"""Name -> the family, a key of `tests.family_configs.FAMILIES`, and what is changed in its configuration."""
