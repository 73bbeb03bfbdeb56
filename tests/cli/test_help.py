"""What --help shows: a usage of one line, and for every value what it is."""

from __future__ import annotations

import pytest

from quire.cli.parser import COMMANDS, create_parser

WORDS = {
    "run": "quire run [MODEL] [PROMPT] [flags]",
    "serve": "quire serve [MODEL] [flags]",
    "replay": "quire replay FILE [flags]",
    "run-batch": "quire run-batch -i FILE -o FILE [flags]",
    "rm": "quire rm [-h] [-y] NAME [NAME ...]",
}
VALUES = (
    *("--port PORT", "--shutdown-timeout SECONDS", "--max-body-size BYTES", "--max-queued-work N"),
    *("--ssl-keyfile FILE", "--min-body-rate N", "--otlp-traces-endpoint URL", "--uds PATH"),
    *("--hf-overrides JSON", "--kv-disk DIR", "--kv-ram BYTES", "--swap-space GIB", "--max-num-seqs SEQS"),
    *("--gpu-memory-utilization SHARE", "--block-size N", "--num-gpu-blocks-override N", "--max-connections"),
)


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        create_parser(words[0]).parse_args([*words, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_usage_is_short_and_names_what_must_be_given(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage = help_of(capsys, command).partition("\n\n")[0]
    assert usage.startswith(f"usage: {WORDS.get(command, f'quire {command}')}")
    assert len(usage.splitlines()) <= 4


def test_a_value_has_its_unit_or_kind_for_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "serve")
    for value in VALUES:
        assert f"  {value}" in shown, value


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_a_command_that_is_left_out_is_answered_with_those_there_are(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        create_parser(*words).parse_args(words)
    assert end.value.code == 2
    assert "  serve  " in capsys.readouterr().err
