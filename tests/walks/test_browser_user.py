"""Somebody with only a browser: open, ask, stop, regenerate, come back later, read the documentation."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import Running, stand_in, wait_for
from tests.server.test_console import press, say, shown

QUESTION = "What is a KV cache?"


def test_somebody_with_only_a_browser(server: Running, page: Any) -> None:
    page.goto(server.url)
    assert page.title() == "quire"
    page.locator("#prompt").wait_for()

    # A question is answered, and the numbers stand below it.
    say(page, QUESTION)
    assert "The KV cache stores the keys" in page.locator(".output").last.text_content()
    assert "tokens · first after" in page.locator(".summary").last.text_content()

    # A second question is stopped: what there is of the answer stays.
    with stand_in(server) as held:
        page.fill("#prompt", "Tell me more.")
        page.press("#prompt", "Enter")
        wait_for(lambda: server.engine.num_unfinished == 1)
        page.click("#stop")
        wait_for(lambda: server.engine.num_unfinished == 0)
        held.may_go.set()
    page.get_by_text("stopped").first.wait_for()

    # The answer is asked for again.
    press(page, "Regenerate")
    page.locator("article").last.locator(".summary").get_by_text("tokens · first after").wait_for()

    # Another day: the conversation is still there.
    before = shown(page)
    assert before[0] == QUESTION
    page.reload()
    page.locator("article").nth(3).wait_for()
    assert shown(page) == before
    assert QUESTION in page.locator("article").first.text_content()

    # The documentation of the API, from this server alone.
    page.goto(f"{server.url}/docs")
    page.get_by_text("/v1/chat/completions").first.wait_for()
    assert server.is_idle
