"""The page as a whole: the key, the docs, drawers, contrast, accessibility, weight."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from typing import Any
from urllib.parse import urlsplit

import pytest

from quire import __version__
from tests.server.conftest import MODEL, TIMEOUT, Running, stand_in, wait_for
from tests.server.console.conftest import KEY, SCRIPTS, everything_shown, kept, photograph, say

AXE = "4.14.1"
MAX_WEIGHT = 300_000
"""Bytes of the first load, not compressed."""
MAX_REQUESTS = 40
MAX_FIRST_WEIGHT = 40_000
"""Bytes that the first paint waits for, not compressed."""


def test_nothing_is_shown_before_a_key_is_given(serve: Any, page: Any) -> None:
    with serve(api_key=(KEY,)) as guarded:
        page.goto(guarded.url)
        page.locator("#gate").wait_for()
        assert page.locator("#console").is_hidden()
        assert MODEL not in page.locator("body").inner_text()
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.get_by_text("Incorrect API key provided.").wait_for()
        assert page.locator("#console").is_hidden()
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.locator("#console").wait_for()
        say(page, "hi")
        assert page.locator(".summary").count() == 1
        stored = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert stored == [0, 0, ""]
        assert len(kept(page)) == 1
        assert KEY not in json.dumps(kept(page))
        with stand_in(guarded) as held:
            page.fill("#prompt", "again")
            page.press("#prompt", "Enter")
            wait_for(lambda: guarded.engine.num_unfinished == 1)
            page.click("#forget")
            wait_for(lambda: guarded.engine.num_unfinished == 0)
            held.may_go.set()
        assert page.locator("#console").is_hidden()
        wait_for(lambda: not kept(page)[0]["messages"][-1]["running"])
        assert page.locator("article, #conversation-list button").count() == 0
        assert page.locator("#title").text_content() == ""


def test_the_api_docs_need_no_other_server_and_can_try_a_route(server: Running, page: Any) -> None:
    page.goto(f"{server.url}/docs")
    page.get_by_text("/v1/chat/completions").first.wait_for()
    block = page.locator(".opblock").filter(has_text="/version").first
    block.locator("button.opblock-summary-control").click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    block.locator(".live-responses-table").get_by_text(__version__).first.wait_for()


def test_narrow_windows_have_drawers_that_the_keyboard_opens_and_closes(server: Running, page: Any) -> None:
    page.set_viewport_size({"width": 420, "height": 800})
    page.goto(server.url)
    page.locator("#open-side:enabled").wait_for()
    for opener, drawer in (("#open-conversations", "#conversations"), ("#open-side", "#side")):
        assert not page.locator(drawer).is_visible()
        page.focus(opener)
        page.keyboard.press("Enter")
        assert page.locator(drawer).is_visible()
        assert page.evaluate(f"document.querySelector('{drawer}').contains(document.activeElement)")
        page.keyboard.press("Escape")
        assert not page.locator(drawer).is_visible()
        assert page.evaluate("document.activeElement.id") == opener[1:]
        assert page.locator(opener).get_attribute("aria-expanded") == "false"
        page.click(opener)
        page.locator(f"{drawer} .closer").click()
        assert not page.locator(drawer).is_visible()
    page.click("#open-side")
    page.focus("#live-tab")
    page.keyboard.press("ArrowRight")
    assert page.locator("#controls-panel").is_visible()
    page.mouse.click(5, 400)
    assert not page.locator("#side").is_visible()
    page.click("#open-conversations")
    page.click("#new")
    assert not page.locator("#conversations").is_visible()
    assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.parametrize("width", [1440, 1000, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_nothing_sticks_out(server: Running, page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    everything_shown(page, server)
    photograph(page, f"console-{width}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for tab in ("#live-tab", "#controls-tab"):
        page.locator(tab).dispatch_event("click")
        ratios = page.evaluate(_CONTRASTS)
        assert min(ratio for _, ratio in ratios) >= 4.5, sorted(ratios, key=lambda item: item[1])[:5]
    names = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')]"
        ".map(e => e.ariaLabel || e.ariaLabelledByElements?.map(l => l.textContent).join('')"
        " || (e.labels?.length ? [...e.labels].map(l => l.textContent).join('') : e.textContent))"
    )
    assert all(name.strip() for name in names)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: Any) -> str:
    """The source of axe-core, from npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "pack", f"axe-core@{AXE}", "--silent"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT)
    if done.returncode != 0:
        pytest.skip(f"axe-core cannot be had from npm: {done.stderr[:200]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as packed:
        source = packed.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


def violations(page: Any) -> list[Any]:
    """What axe, which the page has loaded, finds: rules, and the elements that break them."""
    found = page.evaluate("axe.run()")["violations"]
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


@pytest.mark.network
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_where_a_key_is_asked_for(serve: Any, page: Any, axe: str, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    with serve(api_key=(KEY,)) as guarded:
        page.goto(guarded.url)
        page.locator("#gate").wait_for()
        page.evaluate(axe)
        assert violations(page) == []
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.locator("#refusal:visible").wait_for()
        assert violations(page) == []


@pytest.mark.network
@pytest.mark.parametrize("width", [1440, 1000, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(server: Running, page: Any, axe: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    everything_shown(page, server)
    page.evaluate(axe)

    def check(what: str) -> None:
        page.wait_for_timeout(200)  # a drawer that is half transparent has no contrast
        assert violations(page) == [], what

    check("conversation")
    for opener in ("#open-conversations", "#open-side"):
        if page.locator(opener).is_visible():
            page.click(opener)
            check(opener)
            if opener == "#open-conversations":
                page.keyboard.press("Escape")
    page.click("#controls-tab")
    check("settings")
    page.keyboard.press("Escape")
    page.click("#rename")
    check("dialog")


def test_the_first_load_is_light_and_only_the_style_keeps_it_from_the_screen(server: Running, page: Any) -> None:
    sizes: dict[str, int] = {}
    asked: set[str] = set()
    page.on("request", lambda request: asked.add(request.url))
    page.on("requestfinished", lambda request: sizes.update({request.url: len(request.response().body())}))
    page.goto(server.url)
    page.locator("#state[data-state=ready]").wait_for()
    wait_for(lambda: page.evaluate("document.readyState") == "complete" and asked == sizes.keys())
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    print(f"console: {sum(sizes.values()):,} bytes in {len(sizes)} requests, first paint after {paint} ms")
    assert sum(sizes.values()) < MAX_WEIGHT
    assert len(SCRIPTS) < len(sizes) <= MAX_REQUESTS
    assert not [url for url in sizes if "/highlight/" in url], "loaded when there is code to colour"
    blocking = page.evaluate(
        "performance.getEntriesByType('resource').filter((one) => one.renderBlockingStatus === 'blocking')"
        ".map((one) => new URL(one.name).pathname)"
    )
    assert blocking == ["/console/style.css"]


def test_the_first_paint_needs_the_page_and_its_style_alone(server: Running, page: Any) -> None:
    held: list[Any] = []
    asked: dict[str, int] = {}
    page.route("**/console/start.js", lambda route: held.append(route))
    page.on("requestfinished", lambda one: asked.update({urlsplit(one.url).path: len(one.response().body())}))
    page.goto(server.url, wait_until="commit")
    wait_for(lambda: page.evaluate("performance.getEntriesByName('first-contentful-paint').length"))
    assert page.locator("header").is_visible()
    assert page.locator("#state").text_content() == "connecting"
    assert asked.keys() - {"/console/icon.svg"} == {"/", "/console/style.css"}
    print(f"console: first paint after {sum(asked.values()):,} bytes in {len(asked)} requests")
    assert sum(asked.values()) < MAX_FIRST_WEIGHT
    (script,) = held
    script.continue_()
    page.locator("#state[data-state=ready]").wait_for()


def test_a_browser_that_does_not_tell_when_it_paints_loads_the_console_too(server: Running, page: Any) -> None:
    page.add_init_script("PerformanceObserver.prototype.observe = () => {}")
    page.goto(server.url)
    page.locator("#state[data-state=ready]").wait_for()


_CONTRASTS = """() => {
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return /, 0\\)$/.test(color) && element.parentElement ? ground(element.parentElement) : color;
  };
  const hasText = (e) => [...e.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  return [...document.querySelectorAll("body *")]
    .filter((e) => e.checkVisibility() && !e.disabled && hasText(e))
    .map((e) => {
      const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))];
      return [e.outerHTML.slice(0, 60), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
    });
}"""
