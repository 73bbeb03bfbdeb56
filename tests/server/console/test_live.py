"""The live view of the engine."""

from __future__ import annotations

import threading
from typing import Any

from tests.server.conftest import TIMEOUT, Running, stand_in, wait_for


def test_the_engine_is_shown_while_it_works(server: Running, page: Any) -> None:
    page.goto(server.url)
    page.locator("#state[data-state=ready]").wait_for()
    body = {"prompt": "import os", "max_tokens": 500, "n": 4, "ignore_eos": True}
    thread = threading.Thread(target=server.client.post, args=("/v1/completions",), kwargs={"json": body})
    with stand_in(server) as held:
        thread.start()
        wait_for(lambda: server.parts.core.has_work())
        held.may_go.set()
        thread.join(TIMEOUT)
    server.wait_idle()
    total = server.client.get("/v1/stats").json()["stats"]
    page.locator("#pages-cached").get_by_text(f"{total['num_cached_blocks']:,}", exact=True).wait_for()
    page.locator("#pages[aria-label^='KV cache, 512 blocks: 0 shared, 0 used']").wait_for()
    page.locator("figure").first.get_by_text("tok/s").wait_for()
    assert page.locator("#hits").text_content().endswith("%")


def test_each_figure_explains_itself_to_pointer_and_keyboard(server: Running, page: Any) -> None:
    page.goto(server.url)
    page.locator("#state[data-state=ready]").wait_for()
    terms = page.locator("#live .term")
    helps = terms.evaluate_all("all => all.map((term) => term.dataset.help)")
    assert len(helps) == len(set(helps)) == page.locator("#live dt, #live figcaption, .limit").count() + 1  # KV cache
    assert all(help.endswith(".") for help in helps)
    terms.first.hover()
    assert page.locator("#help").text_content() == helps[0]
    page.keyboard.press("Escape")
    assert page.locator("#help").is_hidden()
    page.focus("#live")
    page.keyboard.press("Tab")
    assert page.locator("#help").text_content() == helps[0]
    assert terms.first.get_attribute("aria-describedby") == "help"
    page.locator("figure canvas").first.hover()
    page.locator("figure").first.get_by_text("s ago:").wait_for()
