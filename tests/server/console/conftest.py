"""A browser, a page that fails on whatever goes wrong in it, and what readers do with it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from quire.server import console
from tests.server.conftest import MODEL, TIMEOUT, Running

FILES = Path(str(resources.files(console)))
SCRIPTS = sorted(FILES.glob("*.js"))
PICTURES = Path(__file__).parents[3] / "build" / "screenshots"
KEY = "a-key"
HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"
MARKDOWN = """# One

Some **bold**, `code`, https://example.org/x, *it*.
A line after a break. [ref]

- a
- b

  more of b
  1. c
  2. d

3) other

| x | y |
|---|--:|
| 1 | 2 |

```python
def f():
    return "<b>"
```

> quoted
lazy

Set
---

    indented

[ref]: https://example.org/ref
Last \\* one"""


IN_NODE = {"batch", "charts", "code", "files", "kvmap", "portable", "request", "timeline", "tokens", "tools", "tree"}
"""Modules that can be loaded without a page."""


def in_node(source: str) -> Any:
    """What a module prints as JSON, run beside the console's files."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    prelude = "".join(f"import * as {file.stem} from '{file.as_uri()}';" for file in SCRIPTS if file.stem in IN_NODE)
    done = subprocess.run(
        [node, "--input-type=module"], input=prelude + source, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium: the one that is installed on this machine, or the one that playwright has installed.

    It ends with the last test of this folder: its event loop would be in the way of other tests.
    """
    api = pytest.importorskip("playwright.sync_api", reason='no browser: pip install "quire[browser]"')
    found = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    with api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(
                executable_path=os.environ.get("QUIRE_TEST_CHROMIUM", found), args=["--no-sandbox"]
            )
        except api.Error as error:
            pytest.skip(f"no browser: playwright install chromium ({str(error).splitlines()[0]})")
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page in which every exception, every refused policy and every request to elsewhere is a failure."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(TIMEOUT * 1000)
    wrong: list[str] = []
    elsewhere: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda line: wrong.append(line.text) if re.search("Trusted|Policy", line.text) else None)
    opened.on("request", lambda request: None if "//127.0.0.1:" in request.url else elsewhere.append(request.url))
    yield opened
    context.close()
    assert (wrong, elsewhere) == ([], [])


def say(page: Any, text: str, number: int = 1) -> None:
    """Send a message and wait until that many requests have ended."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator(".summary, article .error").nth(number - 1).wait_for()


def photograph(page: Any, name: str) -> None:
    """Keep a picture of the page, for people to look at."""
    page.screenshot(path=PICTURES / f"{name}.png")


def set_to(page: Any, **settings: Any) -> None:
    """Fill in the settings."""
    page.locator("#console").wait_for()
    page.click("#controls-tab")
    for name, value in settings.items():
        if name == "mode":
            page.check(f"[value={value}]", force=True)
        elif isinstance(value, bool):
            page.set_checked(f"[name={name}]", value)
        else:
            page.fill(f"[name={name}]", str(value))
    page.click("#live-tab")


def kept(page: Any) -> list[dict[str, Any]]:
    """The conversations that the browser keeps."""
    return page.evaluate("import('/console/store.js').then((store) => store.all('conversations'))")  # type: ignore[no-any-return]


def press(page: Any, name: str, article: int = -1) -> None:
    """Press a button of a message."""
    page.locator("article").nth(article).get_by_role("button", name=name, exact=True).click()


def shown(page: Any) -> list[str]:
    """The text of every message on the screen, from the conversation that is kept."""
    (conversation,) = kept(page)
    by_id = {message["id"]: message for message in conversation["messages"]}
    path, at = [], by_id.get(conversation["leaf"])
    while at:
        path.append(at["text"])
        at = by_id.get(at["parent"])
    return path[::-1]


WHY = {"front_s": 0.01, "queue_s": 0.5, "prefill_s": 0.2, "decode_s": 2, "delivery_s": 0.01, "prompt_tokens": 9}


def stream_of(*deltas: dict[str, Any], **last: Any) -> str:
    """A streamed reply of these deltas; the last chunk has more fields."""
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **last})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer_with(page: Any, *deltas: dict[str, Any], **last: Any) -> None:
    """Let every chat be answered with these deltas instead of the server's; the last chunk has more fields."""
    body = stream_of(*deltas, **last)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def request_of(name: str, *states: str, **fields: Any) -> dict[str, Any]:
    """A request as /v1/stats tells of it, one sequence for each state."""
    sequence = {"computed_tokens": 40, "output_tokens": 8, "blocks": 6, "own_blocks": 4}
    times = {"arrived_s": 3.0, "queue_s": 1.0, "prefill_s": 0.5, "decode_s": 1.5}
    counts = {
        "preemptions": 0,
        "replays": 0,
        "prefill_steps": 2,
        "computed_tokens": 32,
        "queued_steps": {"kv cache": 3},
    }
    return {
        "id": name,
        "n": len(states),
        "prompt_tokens": 32,
        "cached_tokens": 16,
        "max_tokens": 16,
        **times,
        **counts,
        "queued_steps": {"kv cache": 3},
        "sequences": [{"branch": index, "state": state, **sequence} for index, state in enumerate(states)],
        **fields,
    }


def report_with(server: Running, page: Any, *requests: dict[str, Any], **fields: Any) -> None:
    """Let the page read these requests instead of the server's."""
    server.post("/v1/completions", prompt="a", max_tokens=1)  # an engine that has done nothing has no statistics
    status = server.client.get("/v1/stats").json()
    counts = {"num_total_blocks": 100, "num_free_blocks": 60, "num_cached_blocks": 20, "num_shared_blocks": 6}
    status["stats"] |= {**counts, "num_running": 5, "num_waiting": 9}
    status["activity"] = {"age_s": 0, "num_running": 2, "num_waiting": 2, "num_keys": 1, "requests": requests, **fields}
    page.route("**/v1/stats*", lambda route: route.fulfill(json=status))


def everything_shown(page: Any, server: Running) -> None:
    """A page with every kind of message, of row, and of file."""
    states = ("output", "prompt", "preempted", "queued")
    requests = [request_of(name * 8, state) for name, state in zip("abcd", states, strict=True)]
    report_with(server, page, *requests, num_keys=2)
    page.goto(server.url)
    set_up = {"reasoning": "Hm.", "content": MARKDOWN, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    answer_with(page, set_up, why=[WHY])
    page.locator("#console").wait_for()
    say(page, "Show me all")
    page.locator(".tool").wait_for()
    press(page, "Regenerate")
    page.locator(".where").wait_for()
    page.locator("#send:visible").wait_for()
    page.locator("details.summary > summary").click()
    page.set_input_files("#attach-file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"a"})
    if page.locator("#live").is_visible():
        page.locator("#batch .sequence").first.click()
