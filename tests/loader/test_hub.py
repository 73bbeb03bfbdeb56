"""resolve_model: directories, repository names, and what is neither."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from quire.errors import MissingDependency, ModelNotFound
from quire.loader import hub


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: object) -> None:
    module = ModuleType("huggingface_hub")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["no/such/directory", "./nothing", "nothing", "org/", "/absent", "a b/c", "../x"])
def test_what_is_neither_directory_nor_repository_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelNotFound, match="no directory"):
        hub.resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelNotFound, match="is a file"):
        hub.resolve_model(str(file))


def test_a_repository_is_fetched_without_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    fake_hub(monkeypatch, download)
    assert hub.resolve_model("org/name", "v1") == tmp_path
    assert asked["name"] == "org/name"
    assert asked["revision"] == "v1"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert "*.safetensors" in patterns
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in patterns)


@pytest.mark.parametrize("error", [OSError("no route to host"), ValueError("bad name"), FileNotFoundError("")])
def test_a_failed_download_says_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: object) -> str:
        raise error

    fake_hub(monkeypatch, download)
    with pytest.raises(ModelNotFound, match=r"org/name.*v1.*HF_HUB_OFFLINE"):
        hub.resolve_model("org/name", "v1")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"quire\[hub\]"):
        hub.resolve_model("org/name")
