"""docs/gguf.md lists what is read."""

from pathlib import Path

import pytest

from quire.config.families import ARCHITECTURES as FAMILIES
from quire.config.gguf.architectures import ARCHITECTURES
from quire.config.gguf.tensor_types import PLAIN, QUANTIZED
from quire.tokenizer.gguf.pre_tokenizers import PRE_TOKENIZERS
from tests.gguf.files import ALSO
from tests.gguf.files import ARCHITECTURES as WRITTEN

SAME = {
    "internlm2": "llama",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3moe",
    "nemotron_h": "nemotron_h_moe",
}
"""Architectures that are read as others are."""
PAGE = Path(__file__).parents[2] / "docs" / "gguf.md"


@pytest.mark.parametrize("name", [*PLAIN, *QUANTIZED, *(f"`{name}`" for name in (*ARCHITECTURES, *PRE_TOKENIZERS))])
def test_what_is_read_is_on_the_page(name: str) -> None:
    assert name in PAGE.read_text()


def test_every_architecture_is_a_family_and_is_tested() -> None:
    assert {how.model_type for how in ARCHITECTURES.values()} <= {*FAMILIES}
    assert {*ARCHITECTURES} == {*WRITTEN.values(), *ALSO, *SAME}
    assert all(ARCHITECTURES[name] == ARCHITECTURES[tested] for name, tested in SAME.items())
