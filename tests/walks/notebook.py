"""A notebook: cells run by a real Jupyter kernel, and what each of them shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT = 60
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """What stands below a cell once it has run."""

    stdout: str = ""
    stderr: str = ""
    text: str = ""
    """Of the value of the last line."""
    html: str = ""
    help: str = ""
    """What `name?` opens."""
    error: str = ""
    """The last line of a traceback."""
    traceback: str = field(default="", repr=False)

    def take(self, message: dict[str, Any]) -> None:
        """Add one message of the kernel's."""
        content, kind = message["content"], message["header"]["msg_type"]
        if kind == "stream":
            name = content["name"]
            setattr(self, name, getattr(self, name) + content["text"])
        elif kind in ("execute_result", "display_data"):
            self.text = content["data"].get("text/plain", "")
            self.html = content["data"].get("text/html", "")
        elif kind == "error":
            self.error = f"{content['ename']}: {content['evalue']}"
            self.traceback = ESCAPES.sub("", "\n".join(content["traceback"]))


class Notebook:
    """A kernel and its client."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def run(self, code: str, *, interrupt_at: str | None = None) -> Cell:
        """Run a cell; `interrupt_at` presses the stop button once that is printed."""
        cell, is_interrupted = Cell(), False

        def show(message: dict[str, Any]) -> None:
            nonlocal is_interrupted
            cell.take(message)
            if interrupt_at is not None and interrupt_at in cell.stdout and not is_interrupted:
                is_interrupted = True
                self._manager.interrupt_kernel()

        reply = self._client.execute_interactive(code, timeout=TIMEOUT, output_hook=show)
        for page in reply["content"].get("payload", ()):
            cell.help += ESCAPES.sub("", page["data"]["text/plain"])
        return cell

    def complete(self, code: str) -> list[str]:
        """What the Tab key offers behind a piece of code."""
        content = self._client.complete(code, reply=True, timeout=TIMEOUT)["content"]
        return [str(match) for match in content["matches"]]


@contextmanager
def opened(directory: Path) -> Iterator[Notebook]:
    """A new notebook in a directory."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(connection_file=str(directory / "kernel.json"), transport="ipc", ip=str(directory / "k"))
    env = {"HOME": str(directory), "IPYTHONDIR": str(directory), "JUPYTER_PLATFORM_DIRS": "1"}
    manager.start_kernel(cwd=str(directory), env={**environment(), **env})
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def environment() -> dict[str, str]:
    """The environment, without what changes what is shown."""
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "HF_", "PYTEST_"))}
