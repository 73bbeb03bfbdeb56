"""`quire bench machine`: figures of the kernels, and what they mean for a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.config.memory.weights.formats import COMPACT_ISAS
from quire.ops.cpu import library, speed

needs_kernels = pytest.mark.skipif(library.unavailable_reason() is not None, reason="native kernels are not built")


@needs_kernels
@pytest.mark.parametrize("method", [None, "int8", "int4"])
def test_figures_follow_from_what_was_measured(
    method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(speed, "FEATURES", 256)
    path = tmp_path / "figures.json"
    options = [] if method is None else ["--quantization", method]
    assert main(["bench", "machine", "--output-json", str(path), *options]) == 0
    found = json.loads(path.read_text())
    assert set(found["products"]) == set(speed.FORMATS)
    width = found["products"]["bfloat16"]["bytes_per_weight"]
    assert 1.5 < width < 1.6 if library.isa() in COMPACT_ISAS else width == 2
    assert 0.5 < found["products"]["int4"]["bytes_per_weight"] < 0.6
    assert found["step"]["weights"] == (method or "bfloat16")
    assert found["step"]["decode_s"] > 0 < found["step"]["prompt_s"]
    assert f"quire-tiny, {method or 'bfloat16'}: a token reads" in capsys.readouterr().out


@needs_kernels
def test_fewer_bits_are_fewer_bytes() -> None:
    sizes = [speed.products(name).bytes_per_weight for name in ("float32", "float16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)


def test_without_native_kernels_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.platforms.current import current_capabilities

    monkeypatch.setenv("QUIRE_OPS", "reference")
    current_capabilities.cache_clear()
    try:
        assert main(["bench", "machine"]) != 0
    finally:
        current_capabilities.cache_clear()
    assert "there are no native kernels to measure: set by QUIRE_OPS" in capsys.readouterr().err
