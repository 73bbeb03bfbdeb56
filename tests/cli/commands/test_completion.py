"""Shell completion: the scripts know every command and flag, and their shell can read them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.cli.commands.completion import SHELLS
from quire.cli.main import main
from quire.cli.parser import COMMANDS, create_parser
from tests.contracts.test_imports import HEAVY, modules_after


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_in_the_script(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capfd.readouterr().out
    (commands,) = (action for action in create_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name in COMMANDS:
        assert name in script
        for flag, action in commands.choices[name]._option_string_actions.items():
            assert flag.lstrip("-") in script or action.help == argparse.SUPPRESS


def test_bash_completes_flags_of_nested_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "quire.bash"
    script.write_text(capfd.readouterr().out)
    words = f"source {script}; COMP_WORDS=(quire bench serve --max-c); COMP_CWORD=3; _shtab_quire; echo $COMPREPLY"
    done = subprocess.run([bash, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "--max-concurrency"


def test_making_a_script_imports_nothing_heavy() -> None:
    assert modules_after("import quire.cli.main as m\nm.main(['completion', 'bash'])").isdisjoint(HEAVY)
