"""`quire models`: what could run, for people and for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.cli.main import main
from quire.config.families import ARCHITECTURES


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["models", "--json", *words]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_programs_get_every_family_that_quire_has(capsys: pytest.CaptureFixture[str]) -> None:
    rows = listed(capsys)
    own = {row["model_type"]: row["architecture"] for row in rows if row["package"] == "quire"}
    assert own == dict(ARCHITECTURES)
    assert {row["kind"] for row in rows if row["model_type"] in ("llama", "mixtral")} == {"dense", "mixture of experts"}


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) == 1 + len(ARCHITECTURES), "nothing is folded where nobody looks"
    assert lines[0].split() == ["family", "model_type", "architecture", "kind", "how", "it", "differs"]
    for words in ("MixtralForCausalLM", "mixture of experts", "OLMo, the first", "(not with clip_qkv)"):
        assert words in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mixtral"], {"mixtral"}),
        (["QWEN3"], {"qwen3", "qwen3_moe"}),
        (["qwen", "experts"], {"qwen2_moe", "qwen3_moe"}),
        (["GPT2LMHeadModel"], {"gpt2"}),
        (["santacoder"], {"gpt_bigcode"}),
    ],
)
def test_words_choose_families(words: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = {row["model_type"] for row in listed(capsys, *words)}
    assert found >= expected
    assert all("qwen" in name or "qwen" not in words for name in found)
    assert len(found) < len(ARCHITECTURES) / 2


@pytest.mark.parametrize(
    ("words", "parts"),
    [(["mixtrl"], ["'mixtrl'", "did you mean 'mixtral'?"]), (["Qwen/Qwen3-0.6B"], ["quire show NAME"])],
)
def test_no_family_with_a_word_is_an_error_with_the_nearest(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(part in captured.err for part in parts)
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("command", "other"), [("models", "quire list"), ("list", "quire models")])
def test_the_help_tells_both_lists_apart(command: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert other in capsys.readouterr().out
