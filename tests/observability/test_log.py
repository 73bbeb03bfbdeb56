"""Lines for people and for machines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quire.log import JsonFormatter, TextFormatter, request_id


@pytest.fixture
def about_request() -> Iterator[None]:
    token = request_id.set("abc-1")
    yield
    request_id.reset(token)


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("quire.server", logging.ERROR, "file", 1, message, args, None)


@pytest.mark.usefixtures("about_request")
def test_lines_about_a_request_carry_its_id() -> None:
    assert TextFormatter().format(record("failed: %s", "x")).endswith("E quire.server: failed: x request=abc-1")
    assert TextFormatter().format(record("request=abc-1 end=stop")).count("request=") == 1
    assert json.loads(JsonFormatter().format(record("failed")))["request_id"] == "abc-1"


def test_other_lines_carry_none() -> None:
    assert "request" not in TextFormatter().format(record("ready"))
    assert json.loads(JsonFormatter().format(record("ready"))).keys() == {"time", "level", "logger", "message"}


def test_a_json_line_is_one_line_whatever_is_in_it() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = record("first\nsecond")
        line.exc_info = sys.exc_info()
    text = JsonFormatter().format(line)
    assert "\n" not in text
    assert "two\nlines" in json.loads(text)["exception"]


def test_format_and_level_reach_child_processes_and_other_packages() -> None:
    child = "from quire.log import get_logger; get_logger('quire.b').warning('from the child')"
    code = (
        "import logging, subprocess, sys\nfrom quire.log import adopt, configure, get_logger\n"
        "configure('json', 'WARNING'); adopt('uvicorn')\n"
        "get_logger('quire.a').info('not shown'); logging.getLogger('uvicorn.error').warning('from uvicorn')\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("uvicorn.error", "from uvicorn"),
        ("quire.b", "from the child"),
    ]
