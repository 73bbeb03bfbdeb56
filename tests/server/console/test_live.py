"""The live view of the engine."""

from __future__ import annotations

import re
import threading
from typing import Any

from tests.server.conftest import TIMEOUT, Running, stand_in, wait_for
from tests.server.console.conftest import HOSTILE, report_with, request_of, set_to


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
    explained = page.locator("#live dt, #live figcaption, #live .limit, #live h2:has(button)")
    assert len(helps) == len(set(helps)) == explained.count()
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


def test_the_answer_on_the_page_has_a_row_that_opens_to_its_timeline(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, mode="completion", max_tokens=900)
    page.fill("#prompt", "import os")
    for _ in range(20):  # it may end between two reports
        page.press("#prompt", "Enter")
        page.locator("#send:visible").wait_for()
        if page.locator(".sequence .own").count():
            break
    name = page.locator(".sequence .own").first
    assert name.get_attribute("title") == "The answer on this page"
    assert re.fullmatch(r"[0-9a-f]{5}", name.text_content())
    page.locator(".sequence:has(.own)").first.focus()
    page.keyboard.press("Enter")
    said = page.locator(".details:visible dt").all_text_contents()
    assert said[0] == "Queued"
    assert {"Prompt", "Prompt tokens", "Output tokens", "KV blocks", "Request"} <= set(said)
    page.locator("#ended [data-state=ended] .own").first.wait_for()
    page.locator("#batch-empty:visible").wait_for()
    assert page.locator("#ended .details:visible").count() == 1, "what was open stays open"


def test_rows_and_map_say_what_a_report_says(server: Running, page: Any) -> None:
    report_with(
        server,
        page,
        request_of("aaaaaaaa-0", "output", "prompt"),
        request_of("bbbbbbbb-0", "preempted", preemptions=2, cached_tokens=0),
        request_of(HOSTILE, "queued", prefill_s=None, decode_s=None, cached_tokens=None),
        num_running=4,
        num_waiting=3,
        num_keys=2,
    )
    page.goto(server.url)
    page.locator("#queue .sequence").nth(1).wait_for()
    assert page.locator("#batch .name").all_text_contents() == ["aaaaa.1", "aaaaa.2"]
    assert page.locator("#batch .state-name").all_text_contents() == ["writing", "reading"]
    assert page.locator("#queue .state-name").all_text_contents() == ["preempted", "queued"]
    assert page.locator("#batch .count").all_text_contents()[:2] == ["32 / 32 prompt", "8 / 16 output"]
    widths = "all => all.map((bar) => bar.style.width)"
    assert page.locator("#batch .track i").evaluate_all(widths)[:4] == ["50%", "50%", "0%", "50%"]
    assert page.locator("#batch-more").text_content() == "2 more running, 1 more waiting"
    share = "Your key has 4 of 5 running and 3 of 9 waiting. 2 keys share the engine evenly."
    assert page.locator("#share").text_content().startswith(share)
    tiles = page.locator("#pages .tile").evaluate_all("all => all.map((tile) => tile.dataset.help)")
    assert [int(help.split()[0]) for help in tiles] == [6, 4, 4, 4, 4, 18], "shared, sequences, others"
    page.locator(".tile[data-request='aaaaaaaa-0']").first.click()
    timeline = page.locator("#batch .timeline").first
    assert timeline.locator("dt").all_text_contents()[:3] == ["Queued", "Prompt", "Output"]
    assert "3 steps: too few free KV blocks" in timeline.text_content()
    assert "8 of at most 16, 4.7 a second" in timeline.text_content()
    page.locator("#queue .sequence").first.click()
    assert "2 times: its blocks were needed" in page.locator("#queue .timeline").first.text_content()
    page.unroute("**/v1/stats*")
    page.locator("#ended .sequence").nth(3).wait_for()
    assert page.locator(".rows img, .rows script").count() == 0
    assert page.locator("#ended .details:visible").count() == 2, "what was open stays open"


def test_sequences_are_asked_for_while_they_are_shown(server: Running, page: Any) -> None:
    page.goto(server.url)
    page.locator("#state[data-state=ready]").wait_for()
    with page.expect_request(lambda request: request.url.endswith("/v1/stats?activity=true")):
        pass
    with page.expect_request(lambda request: request.url.endswith("/v1/stats")):
        page.click("#controls-tab")
    with page.expect_request(lambda request: request.url.endswith("/v1/stats?activity=true")):
        page.click("#live-tab")
    page.set_viewport_size({"width": 800, "height": 800})
    with page.expect_request(lambda request: request.url.endswith("/v1/stats")):
        pass
    with page.expect_request(lambda request: request.url.endswith("/v1/stats?activity=true")):
        page.click("#open-side")


def test_the_panel_can_have_the_whole_window(server: Running, page: Any) -> None:
    page.goto(server.url)
    page.locator("#state[data-state=ready]").wait_for()
    for is_wide in (True, False):
        page.click("#widen")
        assert page.locator("#widen").get_attribute("aria-pressed") == str(is_wide).lower()
        assert page.locator("#playground").is_visible() != is_wide
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("#widen")
    page.set_viewport_size({"width": 800, "height": 800})
    assert page.locator("#playground").is_visible(), "a narrow window has drawers"
