"""The index of a snapshot is data of a stranger: whether all weights are there is asked of it, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.loader.hub import INDEX_FILE, is_complete


@pytest.mark.parametrize("text", ["[" * 200_000, "{", "[]", '{"weight_map": 5}', '{"weight_map": {"a": 1}}', "\x00"])
def test_an_index_that_is_none_completes_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    assert not is_complete(tmp_path)


def test_an_index_is_read_up_to_its_limit(tmp_path: Path) -> None:
    with (tmp_path / INDEX_FILE).open("wb") as file:
        file.truncate(1 << 40)
    assert not is_complete(tmp_path)


def test_an_index_names_the_files_that_must_be_there(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}')
    (tmp_path / "1.safetensors").touch()
    assert not is_complete(tmp_path)
    (tmp_path / "2.safetensors").touch()
    assert is_complete(tmp_path)
