"""The small JSON files of a model directory, read without trusting them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def read_json_object(file: Path, remedy: str, error: type[ConfigError] = ConfigError) -> dict[str, Any] | None:
    """The object in `file`, or None when there is no such file.

    Raises: `error` naming the file, what is wrong with it and the remedy.
    """
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for, a device might never end
            raise error(f"{file} is no regular file. {remedy}")
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise error(f"{file} cannot be read: {reason}. {remedy}") from None
    if not isinstance(value, dict):
        raise error(f"{file} must hold a JSON object, not {type(value).__name__}. {remedy}")
    return value
