"""The console: its files and their policy, its code by itself, and all of it in a browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from quire.server import console
from tests.server.conftest import MODEL, TIMEOUT, Running, stand_in, wait_for

FILES = Path(str(resources.files(console)))
SCRIPTS = sorted(FILES.glob("*.js"))
KEY = "a-key"
HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


# -- the files --------------------------------------------------------------------------------------------------------


def test_the_page_and_all_it_names_are_served_without_a_key(serve: Any) -> None:
    with serve(api_key=(KEY,)) as guarded:
        page = guarded.client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = {f"/{path}" for path in re.findall(r'(?:src|href)="([^"]+)"', page.text)}
        for script in SCRIPTS:
            named |= {f"/console/{path}" for path in re.findall(r'from "\./([^"]+)"', script.read_text())}
        assert named | {"/"} == console.PATHS
        for path in console.PATHS:
            assert guarded.client.get(path).status_code == 200, path
        for path in ("/console/", "/console/nope.js", "/console/__init__.py", "/console/../admin.py", "/v1/stats"):
            assert guarded.client.get(path).status_code == 401, path


def test_behind_the_path_of_a_proxy_the_same_routes_are_open(serve: Any) -> None:
    with serve(api_key=(KEY,), root_path="/proxy") as guarded:
        for path in ("/health", *console.PATHS):
            assert guarded.client.get(path).status_code == 200, path
        for path in ("/v1/stats", "/v1/models", "/proxy/health"):
            assert guarded.client.get(path).status_code == 401, path
        assert guarded.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        assert guarded.client.post("/v1/messages", json={}).json()["type"] == "error", "Anthropic's form"


def test_the_policy_allows_this_server_alone_and_no_markup(server: Running) -> None:
    for path in console.PATHS:
        headers = server.client.get(path).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert set(rules.values()) == {"'none'", "'self'"}
        assert rules["default-src"] == rules["frame-ancestors"] == rules["trusted-types"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"


def test_the_files_name_no_other_server_and_make_no_markup() -> None:
    for file in FILES.iterdir():
        if file.suffix in {".js", ".css", ".html"}:
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"https?://|//[a-z]+\.", text), file.name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|localStorage", text)
    page = (FILES / console.PAGE).read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<script(?![^>]+src=)|<style", page)


def test_what_has_not_changed_is_not_sent_again(server: Running) -> None:
    tag = server.client.get("/").headers["etag"]
    again = server.client.get("/", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert server.client.get("/", headers={"if-none-match": '"other"'}).status_code == 200


# -- what it reads ----------------------------------------------------------------------------------------------------


def test_statistics_say_what_the_engine_did_in_between(server: Running) -> None:
    server.wait_idle()
    server.post("/v1/completions", prompt="a", max_tokens=1)
    before = server.client.get("/v1/stats").json()
    server.post("/v1/completions", prompt=[7] * 40, max_tokens=5, ignore_eos=True)
    server.wait_idle()
    after = server.client.get("/v1/stats").json()
    assert (after["state"], after["num_restarts"], after["num_requests"]) == ("ready", 0, 0)
    assert after["age_s"] >= 0
    names = ("num_generation_tokens", "num_first_tokens")
    assert [after["stats"][name] - before["stats"][name] for name in names] == [5, 1]


def test_statistics_are_told_while_every_place_is_taken(serve: Any) -> None:
    with serve(max_concurrent_requests=1) as small, stand_in(small) as held:
        body = {"prompt": "a", "max_tokens": 1}
        thread = threading.Thread(target=small.client.post, args=("/v1/completions",), kwargs={"json": body})
        thread.start()
        wait_for(lambda: small.engine.num_unfinished == 1)
        assert small.client.post("/v1/completions", json=body).status_code == 429
        assert small.client.get("/v1/stats").json()["num_requests"] == 1
        held.may_go.set()
        thread.join(TIMEOUT)


def test_capabilities_name_the_defaults_that_requests_get(server: Running) -> None:
    defaults = server.client.get("/v1/capabilities").json()["sampling_defaults"]
    ask = {"prompt": "import os", "max_tokens": 12, "seed": 7}
    plain, spelled = server.post("/v1/completions", **ask), server.post("/v1/completions", **ask, **defaults)
    assert plain.json()["choices"] == spelled.json()["choices"]


# -- its code, without a page -----------------------------------------------------------------------------------------

IN_NODE = {"charts", "tokens"}
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


@pytest.mark.parametrize(
    ("chunks", "pieces"),
    [
        ([["ab c", ["ab", " c"]]], [["ab", 1], [" c", 1]]),
        ([["", ["\ufffd"]], ["é", ["\ufffd"]], ["x", ["x"]]], [["é", 2], ["x", 1]]),
        ([["a", ["ab"]], ["bc", ["c"]]], [["ab", 1], ["c", 1]]),
        ([["x", ["<eos>", "x"]]], [["x", 2]]),
        ([["plain", []]], [["plain", 0]]),
        ([["a", ["a"]], ["", ["<eos>"]]], [["a", 1]]),
        ([["a", ["abc"]]], [["a", 1]]),
    ],
)
def test_text_is_cut_where_tokens_end_and_never_changed(chunks: Any, pieces: Any) -> None:
    assert pieces == in_node(
        f"""
        const aligner = new tokens.TokenAligner();
        const push = ([text, spelled]) => aligner.push(text, spelled.map((one) => ({{text: one}})));
        const pieces = {json.dumps(chunks)}.flatMap(push);
        console.log(JSON.stringify([...pieces, ...aligner.end()].map((piece) => [piece.text, piece.tokens.length])));
        """
    )


def test_both_forms_of_logprobs_are_read(server: Running) -> None:
    ask = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    chat = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, **ask
    ).json()
    text = server.post("/v1/completions", prompt="import os", logprobs=2, **ask).json()
    for reply in (chat, text):
        logprobs = reply["choices"][0]["logprobs"]
        read = in_node(f"console.log(JSON.stringify(tokens.tokensOf({json.dumps(logprobs)})));")
        assert len(read) == 3
        assert all(len(token["candidates"]) == 2 for token in read)
        assert all(token["candidates"][0]["logprob"] == token["logprob"] for token in read)


def test_the_page_map_is_full_and_hides_nothing() -> None:
    cases = [[1, 0, 0, 9999], [0, 0, 0, 0], [3, 3, 3, 1], [9999, 1, 1, 1], [0, 0, 0, 5]]
    shares = in_node(f"console.log(JSON.stringify({json.dumps(cases)}.map((counts) => charts.sharesOf(counts, 320))));")
    for counts, squares in zip(cases, shares, strict=True):
        assert len(squares) == 320
        if any(counts):
            assert set(squares) == {part for part, count in enumerate(counts) if count}


def test_a_gap_in_the_values_is_a_gap_in_the_line() -> None:
    runs = in_node("console.log(JSON.stringify(charts.runsOf([null, 1, 2, null, null, 0, null])));")
    assert runs == [[1, 2], [5, 5]]


# -- in a browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: the one that is installed on this machine, or the one that playwright has installed."""
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
    opened = browser.new_page(viewport={"width": 1440, "height": 900})
    opened.set_default_timeout(TIMEOUT * 1000)
    wrong: list[str] = []
    elsewhere: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda line: wrong.append(line.text) if re.search("Trusted|Policy", line.text) else None)
    opened.on("request", lambda request: None if "//127.0.0.1:" in request.url else elsewhere.append(request.url))
    yield opened
    opened.close()
    assert (wrong, elsewhere) == ([], [])


def say(page: Any, text: str, number: int = 1) -> None:
    """Send a message and wait until that many requests have ended."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator(".summary, article .error").nth(number - 1).wait_for()


def test_a_conversation_is_held_and_shown(server: Running, page: Any) -> None:
    page.goto(server.url)
    page.fill("[name=temperature]", "0")
    say(page, "What is a KV cache?")
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    expected = server.post("/v1/chat/completions", messages=messages, temperature=0).json()
    answer = expected["choices"][0]["message"]["content"]
    assert page.locator(".output").text_content() == answer
    usage = expected["usage"]
    assert f"→ {usage['completion_tokens']} tokens · first after" in page.locator(".summary").text_content()
    say(page, "And why?", 2)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And why?"}]
    expected = server.post("/v1/chat/completions", messages=messages, temperature=0).json()
    assert page.locator(".output").nth(1).text_content() == expected["choices"][0]["message"]["content"]
    server.wait_idle()


def test_tokens_are_coloured_and_tell_their_alternatives(server: Running, page: Any) -> None:
    page.goto(server.url)
    page.check("[value=completion]", force=True)
    page.check("[name=logprobs]")
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "8")
    say(page, "import os")
    ask = {"prompt": "import os", "temperature": 0, "max_tokens": 8, "logprobs": 5}
    choice = server.post("/v1/completions", **ask).json()["choices"][0]
    assert page.locator(".quote").text_content() + choice["text"] == page.locator(".output").text_content()
    assert page.locator(".token").all_text_contents() == choice["logprobs"]["tokens"]
    page.locator(".token").first.hover()
    shown = page.locator("#candidates tr")
    assert shown.count() in (5, 6)
    assert page.locator("#candidates tr.chosen").count() == 1
    page.keyboard.press("Escape")
    page.focus("#transcript")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token").nth(1).get_attribute("aria-describedby") == "candidates"
    assert page.locator("#candidates").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#candidates").is_hidden()


def test_what_is_said_is_never_markup(server: Running, page: Any) -> None:
    page.goto(server.url)
    say(page, HOSTILE)
    assert page.locator(".user").text_content() == HOSTILE

    def answer(route: Any) -> None:
        head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
        token = {"token": HOSTILE, "logprob": -1.0, "bytes": None}
        logprobs = {"content": [{**token, "top_logprobs": [token, {**token, "token": HOSTILE + "2"}]}]}
        choice = {"index": 0, "delta": {"content": HOSTILE}, "logprobs": logprobs, "finish_reason": "stop"}
        chunk = {**head, "warnings": [HOSTILE], "choices": [choice]}
        failure = {"error": {"message": HOSTILE, "code": HOSTILE}}
        text = "".join(f"data: {json.dumps(part)}\n\n" for part in (chunk, failure))
        route.fulfill(status=200, content_type="text/event-stream", body=text)

    page.route("**/v1/chat/completions", answer)
    say(page, "again", 2)
    page.locator(".error:not(#refusal)").last.wait_for()
    assert page.locator(".output").last.text_content() == HOSTILE
    page.locator(".token").last.hover()
    assert HOSTILE + "2" in page.locator("#candidates").text_content().replace("␣", " ")
    assert page.locator("article img, article script, #candidates img, #candidates script").count() == 0
    assert page.title() == "quire"


def test_stopping_ends_the_request_in_the_engine(server: Running, page: Any) -> None:
    page.goto(server.url)
    page.check("[value=completion]", force=True)
    page.fill("[name=max_tokens]", "900")
    page.fill("#prompt", "import os")
    with stand_in(server) as held:
        page.press("#prompt", "Enter")
        wait_for(lambda: server.engine.num_unfinished == 1)
        page.click("#stop")
        wait_for(lambda: server.engine.num_unfinished == 0)
        held.may_go.set()
    page.get_by_text("stopped").wait_for()
    assert page.locator("#send").is_enabled()
    server.wait_idle()


def test_a_cleared_conversation_is_forgotten_even_while_it_is_answered(server: Running, page: Any) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.goto(server.url)
    say(page, "first")
    with stand_in(server) as held:
        page.fill("#prompt", "second")
        page.press("#prompt", "Enter")
        wait_for(lambda: server.engine.num_unfinished == 1)
        page.click("#clear")
        wait_for(lambda: server.engine.num_unfinished == 0)
        held.may_go.set()
    assert page.locator("article").count() == 0
    page.locator("#send:enabled").wait_for()
    say(page, "third")
    assert [message["content"] for message in sent[1]["messages"]][::2] == ["first", "second"]
    assert sent[2]["messages"] == [{"role": "user", "content": "third"}]


def test_errors_are_shown_as_the_server_says_them(server: Running, page: Any) -> None:
    page.goto(server.url)
    for value in ("9", "hot"):
        page.fill("[name=temperature]", value)
        page.click("#clear")
        say(page, "hi")
        given = float(value) if value.isdigit() else value
        message = server.post("/v1/chat/completions", messages=[], temperature=given).json()["error"]["message"]
        assert message in page.locator("article .error").text_content()
        assert page.input_value("#prompt") == "hi"


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
        page.click("#forget")
        assert page.locator("#console").is_hidden()
        assert page.locator(".output").count() == 0


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
    assert page.locator("#pages").get_attribute("aria-label").startswith("KV cache, 512 blocks: 0 shared, 0 used")
    page.locator("figure").first.get_by_text("tok/s").wait_for()
    assert page.locator("#hits").text_content().endswith("%")


@pytest.mark.parametrize("width", [1440, 1000, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_nothing_sticks_out(server: Running, page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(server.url)
    page.locator("#console").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ratios = page.evaluate(_CONTRASTS)
    assert min(ratio for _, ratio in ratios) >= 4.5, sorted(ratios, key=lambda item: item[1])[:5]
    names = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea')]"
        ".map(e => e.labels?.length ? [...e.labels].map(l => l.textContent).join('') : e.textContent)"
    )
    assert all(name.strip() for name in names)


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
