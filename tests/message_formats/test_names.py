"""The names that flags take are those of the formats, and importing them imports nothing else."""

from __future__ import annotations

import subprocess
import sys

from quire.message_formats.formats import CALLS, THINKING
from quire.message_formats.names import CALL_FORMATS, THINKING_FORMATS


def test_the_names_are_those_of_the_formats() -> None:
    assert list(CALL_FORMATS) == sorted(CALLS)
    assert list(THINKING_FORMATS) == sorted(THINKING)


def test_settings_import_no_tokenizer() -> None:
    code = "import sys, quire.server.settings; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
