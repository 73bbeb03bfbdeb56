"""The console: its files and their policy, its code by itself, and all of it in a browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from quire import __version__
from quire.messages.stats import Constraint
from quire.server import console
from quire.server.launch import pages_of
from quire.server.settings import ServerSettings
from tests.server.conftest import MODEL, TIMEOUT, Running, stand_in, wait_for

FILES = Path(str(resources.files(console)))
SCRIPTS = sorted(FILES.glob("*.js"))
KEY = "a-key"
AXE = "4.14.1"
MAX_WEIGHT = 400_000
"""Bytes of the first load, not compressed."""
HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


# -- the files --------------------------------------------------------------------------------------------------------


def test_the_page_and_all_it_names_are_served_without_a_key(serve: Any) -> None:
    with serve(api_key=(KEY,)) as guarded:
        page = guarded.client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = {f"/{path}" for path in re.findall(r'(?:src|href)="([^"]+)"', page.text)}
        for script in SCRIPTS:
            imported = re.findall(r'(?:from|import) "\./([^"]+)"', script.read_text(encoding="utf-8"))
            named |= {f"/console/{path}" for path in imported}
        assert named | {"/"} == console.PATHS
        for path in console.PATHS:
            assert guarded.client.get(path).status_code == 200, path
        for path in ("/console/", "/console/nope.js", "/console/__init__.py", "/console/../admin.py", "/v1/stats"):
            assert guarded.client.get(path).status_code == 401, path


def test_every_module_is_asked_for_at_once() -> None:
    page = (FILES / console.PAGE).read_text(encoding="utf-8")
    preloaded = re.findall(r'rel="modulepreload" href="([^"]+)"', page)
    assert sorted([*preloaded, "console/app.js"]) == sorted(path[1:] for path in console.PATHS if path.endswith(".js"))


def test_behind_the_path_of_a_proxy_the_same_routes_are_open(serve: Any) -> None:
    with serve(api_key=(KEY,), root_path="/proxy") as guarded:
        for path in ("/health", *console.PATHS):
            assert guarded.client.get(path).status_code == 200, path
        for path in ("/v1/stats", "/v1/models", "/proxy/v1/models"):
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


def test_the_pages_are_named_for_browsers_alone() -> None:
    url = "http://127.0.0.1:8000"
    assert pages_of(url, ServerSettings()) == f"; console: {url}/, API docs: {url}/docs"
    assert pages_of(url, ServerSettings(disable_fastapi_docs=True)) == f"; console: {url}/"
    assert pages_of("unix:/run/quire", ServerSettings(uds="/run/quire")) == ""


def test_the_docs_are_files_of_this_server_and_hidden_with_the_rest(serve: Any) -> None:
    with serve() as server:
        page = server.client.get("/docs")
        paths = {f"/{path}" for path in re.findall(r'(?:src|href)="([^"]+)"', page.text)}
        assert {"/docs/docs.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"} <= paths
        for path in paths:
            assert server.client.get(path).status_code == 200, path
        rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
        assert rules.pop("img-src") == "'self' data:"
        assert set(rules.values()) == {"'none'", "'self'"}
    with serve(disable_fastapi_docs=True) as server:
        assert {server.client.get(path).status_code for path in paths - console.PATHS} == {404}


def test_redoc_leads_to_the_docs(server: Running) -> None:
    reply = server.client.get("/redoc")
    assert (reply.status_code, reply.headers["location"]) == (307, "docs")
    assert server.client.get("/redoc", follow_redirects=True).status_code == 200


def test_every_vendored_package_comes_with_its_licence() -> None:
    table = (FILES / "vendor" / "README.md").read_text(encoding="utf-8")
    licences = (FILES / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    packages = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2]) if not name.endswith("/")]
    assert {"markdown-it", "@highlightjs/cdn-assets"} <= set(packages)
    for name in packages:
        assert f"==== {name} ====" in licences, name
    for file in (FILES / "vendor").rglob("*.js"):
        assert file.name in table or file.parent.name in table, file


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

IN_NODE = {"charts", "portable", "request", "tokens", "tree"}
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


@pytest.mark.parametrize("total", [10, 512, 8192, 300_000])
def test_the_page_map_zooms_to_what_is_held(total: int) -> None:
    held = [count for count in (0, 1, 63, 65, 500, 4097, total) if count <= total]
    zooms = in_node(f"console.log(JSON.stringify({json.dumps(held)}.map((count) => charts.zoomOf(count, {total}))));")
    for count, zoom in zip(held, zooms, strict=True):
        assert count <= zoom["blocks"] <= total
        assert zoom["blocks"] <= max(64, 2 * count), "at least half of it is full, or it is small"
        assert zoom["size"] * zoom["perSquare"] >= zoom["blocks"] > (zoom["size"] - 1) * zoom["perSquare"]
        assert zoom["size"] <= 320


def test_axes_end_at_round_numbers_that_hold_every_value() -> None:
    tops = in_node("console.log(JSON.stringify([0, 0.03, 1, 1.1, 47, 50, 51, 999].map(charts.ceiling)));")
    assert tops == pytest.approx([1, 0.05, 1, 2, 50, 50, 100, 1000])


def test_every_limit_of_the_engine_has_words() -> None:
    text = (FILES / "live.js").read_text(encoding="utf-8")
    table = text[text.index("const LIMITS") : text.index("};", text.index("const LIMITS"))]
    for constraint in Constraint:
        assert re.search(rf'^  "?{constraint.value}"?: "', table, re.MULTILINE), constraint


A_TREE = """
    const c = tree.newConversation();
    const question = tree.add(c, {role: "user", text: "one\\nmore"});
    const first = tree.add(c, {role: "assistant", text: "A"});
    tree.add(c, {role: "user", text: "two"});
    tree.add(c, {role: "assistant", text: "B"});
    const again = tree.add(c, {role: "assistant", text: "C"}, question.id);
    const path = () => tree.pathOf(c).map((message) => message.text);
"""


def test_versions_of_a_message_are_siblings_and_none_is_lost() -> None:
    paths = in_node(
        A_TREE
        + """
        const paths = [path()];
        tree.choose(c, first.id);
        paths.push(path(), tree.siblingsOf(c, first).map((message) => message.text));
        tree.remove(c, first.id);
        paths.push(path());
        tree.remove(c, again.id);
        paths.push(path());
        tree.remove(c, question.id);
        paths.push(path(), c.messages, c.title);
        console.log(JSON.stringify(paths));
        """
    )
    assert paths == [
        ["one\nmore", "C"],
        ["one\nmore", "A", "two", "B"],
        ["A", "C"],
        ["one\nmore", "C"],
        ["one\nmore"],
        [],
        [],
        "one",
    ]


def test_what_two_tabs_did_to_a_conversation_is_joined() -> None:
    texts = in_node(
        A_TREE
        + """
        const other = structuredClone(c);
        tree.add(other, {role: "user", text: "there"});
        tree.remove(other, first.id);
        tree.changed(other.messages[0]);
        other.messages[0].view = "tokens";
        const writing = tree.add(c, {role: "user", text: "here"});
        tree.merge(c, other, writing);
        tree.merge(other, c);
        const texts = (one) => one.messages.map((message) => message.text).sort();
        console.log(JSON.stringify([texts(c), texts(other), question.view, path().at(-1)]));
        """
    )
    assert texts == [["C", "here", "one\nmore", "there"]] * 2 + ["tokens", "here"]


def test_a_file_of_conversations_comes_back_as_it_was() -> None:
    before, after, markdown = in_node(
        A_TREE
        + """
        again.toolCalls = [{name: "f", arguments: "`` {}"}];
        again.pieces = [{text: "C", tokens: [{text: "C", logprob: -1, candidates: [{text: "D", logprob: -2}]}]}];
        again.unknown = "dropped";
        c.settings = {system: "Be brief.", logprobs: true, max_tokens: "5"};
        const [read] = portable.fromJson(portable.toJson([c]));
        delete again.unknown;
        const bare = ({id, parent, ...rest}) => rest;
        const plain = (one) => [one.title, one.settings, tree.pathOf(one).map(bare), one.messages.length];
        console.log(JSON.stringify([plain(c), plain(read), portable.toMarkdown(c)]));
        """
    )
    assert before == after
    assert markdown.startswith(
        "# one\n\n## System prompt\n\nBe brief.\n\n## You\n\none\nmore\n\n## Answer\n\nC\n\nTool call: `f`"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("{}", "no conversations that this console has exported"),
        (
            '{"format": "quire-conversations", "conversations": [{}]}',
            "Conversation 1 cannot be read: it has no messages",
        ),
        ('{"format": "quire-conversations", "conversations": [{"messages": [{}]}]}', "no role or no text"),
        (
            '{"format": "quire-conversations", "conversations":'
            ' [{"messages": [{"id": "a", "parent": "b", "role": "user", "text": ""}]}]}',
            "comes before the one that it answers",
        ),
    ],
)
def test_a_file_that_cannot_be_read_says_why(text: str, message: str) -> None:
    said = in_node(
        f"try {{ portable.fromJson({json.dumps(text)}); console.log('null'); }}"
        "catch (error) { console.log(JSON.stringify(error.message)); }"
    )
    assert message in said


def test_only_what_was_answered_is_sent_again() -> None:
    body = in_node(
        """
        const said = (role, text) => ({role, text});
        const path = [said("user", "a"), said("assistant", ""), said("completion", "x"), said("user", "b"),
          said("assistant", "c"), said("user", "d")];
        const numbers = {temperature: " 0.5 ", seed: "", top_k: "hot"};
        const settings = {system: "s", stop: "\\\\n\\nend", logprobs: true, ...numbers};
        console.log(JSON.stringify(request.chatBody("m", settings, path)));
        """
    )
    roles = [(message["role"], message["content"]) for message in body["messages"]]
    assert roles == [("system", "s"), ("user", "b"), ("assistant", "c"), ("user", "d")]
    assert (body["stop"], body["temperature"], body["top_k"], body["top_logprobs"]) == (["\n", "end"], 0.5, "hot", 5)
    assert "seed" not in body


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


def stream_of(*deltas: dict[str, Any]) -> str:
    """A streamed reply of these deltas."""
    head = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answer_with(page: Any, *deltas: dict[str, Any]) -> None:
    """Let every chat be answered with these deltas instead of the server's."""
    body = stream_of(*deltas)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_a_conversation_is_held_and_shown(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, temperature=0)
    say(page, "What is a KV cache?")
    messages = [{"role": "user", "content": "What is a KV cache?"}]
    expected = server.post("/v1/chat/completions", messages=messages, temperature=0).json()
    answer = expected["choices"][0]["message"]["content"]
    press(page, "Plain text")
    assert page.locator(".output").last.text_content() == answer
    usage = expected["usage"]
    assert f"→ {usage['completion_tokens']} tokens · first after" in page.locator(".summary").text_content()
    say(page, "And why?", 2)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And why?"}]
    expected = server.post("/v1/chat/completions", messages=messages, temperature=0).json()
    press(page, "Plain text")
    assert page.locator(".output").last.text_content() == expected["choices"][0]["message"]["content"]
    server.wait_idle()


def test_tokens_are_coloured_and_tell_their_alternatives(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, mode="completion", logprobs=True, temperature=0, max_tokens=8)
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
    page.reload()
    page.locator(".token").first.hover()
    assert page.locator("#candidates tr.chosen").count() == 1, "kept with the conversation"
    press(page, "Tokens")
    assert page.locator(".token").count() == 0
    press(page, "Tokens")
    assert page.locator(".token").count() == 8


def test_what_is_said_is_never_markup(server: Running, page: Any) -> None:
    page.goto(server.url)
    say(page, HOSTILE)
    assert page.locator(".user .output").text_content() == HOSTILE

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
    set_to(page, logprobs=True)
    say(page, "again", 2)
    page.locator(".error:not(#refusal)").last.wait_for()
    assert page.locator(".output").last.text_content() == HOSTILE
    page.locator(".token").last.hover()
    assert HOSTILE + "2" in page.locator("#candidates").text_content().replace("␣", " ")
    press(page, "Tokens")
    assert page.locator(".markdown").last.text_content() == HOSTILE
    page.unroute("**/v1/chat/completions")
    set_to(page, logprobs=False)
    links = "[a](javascript:alert(1)) ![x](https://elsewhere.example/x.png)"
    text = f"{links} {HOSTILE}\n\n```{HOSTILE}\n{HOSTILE}\n```\n\n<p>"
    calls = [{"index": 0, "function": {"name": HOSTILE, "arguments": HOSTILE}}]
    answer_with(page, {"reasoning": HOSTILE}, {"content": text}, {"tool_calls": calls})
    say(page, "and again", 3)
    page.locator(".tool").wait_for()
    assert page.locator(":is(article, #candidates, nav, .bar) :is(img, script, iframe)").count() == 0
    assert page.locator("article a[href]").evaluate_all("all => all.map((a) => [a.href, a.rel])") == [
        ["https://elsewhere.example/x.png", "noopener noreferrer"]
    ]
    assert page.title() == "quire"


def test_stopping_ends_the_request_in_the_engine(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, mode="completion", max_tokens=900)
    page.fill("#prompt", "import os")
    for number, stop in enumerate((lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")), 1):
        with stand_in(server) as held:
            page.press("#prompt", "Enter")
            wait_for(lambda: server.engine.num_unfinished == 1)
            assert (page.locator("#send").is_visible(), page.locator("#stop").is_visible()) == (False, True)
            stop()
            wait_for(lambda: server.engine.num_unfinished == 0)
            held.may_go.set()
        page.get_by_text("stopped").nth(number - 1).wait_for()
        assert (page.locator("#send").is_visible(), page.locator("#stop").is_visible()) == (True, False)
    server.wait_idle()


def test_a_deleted_conversation_is_forgotten_even_while_it_is_answered(server: Running, page: Any) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.goto(server.url)
    say(page, "first")
    with stand_in(server) as held:
        page.fill("#prompt", "second")
        page.press("#prompt", "Enter")
        wait_for(lambda: server.engine.num_unfinished == 1)
        page.click("#delete")
        page.click("#ask-accept")
        wait_for(lambda: server.engine.num_unfinished == 0)
        held.may_go.set()
    assert page.locator("article").count() == 0
    page.locator("#send:visible").wait_for()
    assert kept(page) == []
    say(page, "third")
    assert [message["content"] for message in sent[1]["messages"]][::2] == ["first", "second"]
    assert sent[2]["messages"] == [{"role": "user", "content": "third"}]


def test_errors_are_shown_as_the_server_says_them(server: Running, page: Any) -> None:
    page.goto(server.url)
    for value in ("9", "hot"):
        set_to(page, temperature=value)
        page.click("#new")
        page.fill("#prompt", "")
        say(page, "hi")
        given = float(value) if value.isdigit() else value
        message = server.post("/v1/chat/completions", messages=[], temperature=given).json()["error"]["message"]
        assert message in page.locator("article .error").text_content()
        assert page.input_value("#prompt") == "hi"


def test_conversations_are_kept_and_come_back(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, system="Be brief.", max_tokens=8)
    say(page, "first\nof all")
    page.click("#new")
    set_to(page, system="", mode="completion")
    say(page, "import os")
    set_to(page, mode="chat")
    say(page, "both in one", 2)
    page.reload()
    page.locator("article").nth(2).wait_for()
    rows = page.locator("#conversation-list button")
    assert rows.all_text_contents() == ["import os", "first"]
    assert page.locator("article").evaluate_all("all => all.map((a) => a.className)") == [
        "completion",
        "user",
        "assistant",
    ]
    rows.nth(1).click()
    assert page.locator("#title").text_content() == "first"
    assert page.input_value("[name=system]") == "Be brief."
    assert page.locator(".user .output").text_content() == "first\nof all"
    page.click("#rename")
    page.fill("#ask-text", HOSTILE)
    page.press("#ask-text", "Enter")
    page.locator("#title").get_by_text(HOSTILE).wait_for()
    page.click("#delete")
    page.click("#ask-cancel")
    page.click("#delete")
    page.click("#ask-accept")
    page.locator("#title").get_by_text("import os").wait_for()
    wait_for(lambda: [one["title"] for one in kept(page)] == ["import os"])
    server.wait_idle()


def test_what_cannot_be_kept_is_said_and_the_answer_still_comes(server: Running, page: Any) -> None:
    page.add_init_script("IDBObjectStore.prototype.put = () => { throw new Error('disk full'); };")
    page.goto(server.url)
    set_to(page, max_tokens=4)
    say(page, "hi")
    page.get_by_text("This conversation could not be kept (disk full).").wait_for()
    page.add_init_script("IDBObjectStore.prototype.getAll = () => { throw new Error('damaged'); };")
    page.reload()
    page.get_by_text("The conversations in this browser could not be read (damaged).").wait_for()
    page.add_init_script("IDBFactory.prototype.open = () => { throw new Error('private'); };")
    page.reload()
    page.get_by_text("This browser lets pages keep nothing.").wait_for()
    say(page, "hi")
    page.click("#new")
    page.locator("#conversation-list button").click()
    assert page.locator("article").count() == 2
    page.click("#delete-all")
    page.click("#ask-accept")
    page.locator("#conversation-list:empty").wait_for()


def test_what_is_exported_can_be_imported(server: Running, page: Any, tmp_path: Path) -> None:
    page.goto(server.url)
    set_to(page, max_tokens=8)
    say(page, "What is a KV cache?")
    files = {}
    for name in ("export-json", "export-markdown", "export-all"):
        with page.expect_download() as caught:
            page.click(f"#{name}")
        files[name] = tmp_path / caught.value.suggested_filename
        caught.value.save_as(files[name])
    assert [file.name for file in files.values()] == [
        "What-is-a-KV-cache.json",
        "What-is-a-KV-cache.md",
        "conversations.json",
    ]
    question, answer = shown(page)
    assert (
        files["export-markdown"].read_text(encoding="utf-8")
        == f"# {question}\n\n## You\n\n{question}\n\n## Answer\n\n{answer}\n"
    )
    before = kept(page)
    page.set_input_files("#import-file", files["export-all"])
    page.locator("#conversation-list button").nth(1).wait_for()
    wait_for(lambda: len(kept(page)) == 2)
    texts = [[message["text"] for message in one["messages"]] for one in kept(page)]
    assert texts == [[question, answer]] * 2
    assert before[0]["id"] in {one["id"] for one in kept(page)}
    page.set_input_files("#import-file", files["export-markdown"])
    page.get_by_text("This file is not JSON.").wait_for()


def test_two_tabs_do_not_lose_what_the_other_has_kept(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, max_tokens=4)
    say(page, "one")
    other = page.context.new_page()
    try:
        other.goto(server.url)
        say(other, "two", 2)
        page.locator("article").nth(3).wait_for()
        say(page, "three", 3)
        assert shown(page)[::2] == ["one", "two", "three"]
        with stand_in(server) as held:
            for tab, text in ((page, "four"), (other, "five")):
                tab.fill("#prompt", text)
                tab.press("#prompt", "Enter")
            wait_for(lambda: server.engine.num_unfinished == 2)
            held.may_go.set()
        for tab in (page, other):
            tab.locator("#send:visible").wait_for()
        wait_for(lambda: {"four", "five"} <= {message["text"] for message in kept(page)[0]["messages"]})
        other.click("#delete")
        other.click("#ask-accept")
        page.locator("#conversation-list:empty").wait_for()
        assert page.locator("article").count() == 0
    finally:
        other.close()


def test_an_answer_has_versions_and_each_can_be_reached(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, max_tokens=6, temperature=0)
    say(page, "one")
    say(page, "two", 2)
    press(page, "Regenerate", 1)
    page.locator(".where").get_by_text("2/2").wait_for()
    page.locator("#send:visible").wait_for()
    assert page.locator("article").count() == 2, "what came below the first version belongs to that one"
    press(page, "Previous version", 1)
    assert page.locator("article").count() == 4
    assert page.locator(".where").text_content() == "1/2"
    press(page, "Edit", 2)
    page.fill(".edit textarea", "another two")
    page.press(".edit textarea", "Enter")
    page.locator("article.user .where").get_by_text("2/2").wait_for()
    page.locator("#send:visible").wait_for()
    assert shown(page)[::2] == ["one", "another two"]
    page.reload()
    page.locator("article.user .where").get_by_text("2/2").wait_for()
    press(page, "Delete", 2)
    page.get_by_text("Delete this message and the 1 below it?").wait_for()
    page.click("#ask-accept")
    page.locator("article.user .output").nth(1).get_by_text("two", exact=True).wait_for()
    assert page.locator("article.user .where").count() == 0
    server.wait_idle()


def test_an_answer_goes_on_where_it_ended(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, max_tokens=5, temperature=0)
    for number, mode in enumerate(("chat", "completion")):
        page.click("#new")
        set_to(page, mode=mode)
        say(page, "import os")
        before = page.evaluate("document.querySelector('.summary').textContent")
        press(page, "Continue")
        page.locator("#send:visible").wait_for()
        page.locator(".summary").wait_for()
        assert before
        conversation = next(one for one in kept(page) if one["settings"]["mode"] == mode)
        text = conversation["messages"][-1]["text"]
        if mode == "chat":
            path, field, whole = (
                "/v1/chat/completions",
                "message",
                {"messages": [{"role": "user", "content": "import os"}]},
            )
        else:
            path, field, whole = "/v1/completions", "text", {"prompt": "import os"}
        choice = server.post(path, **whole, temperature=0, max_tokens=10).json()["choices"][0]
        expected = choice[field]["content"] if mode == "chat" else choice[field]
        assert text == expected, number
    server.wait_idle()


def test_reasoning_and_tool_calls_have_their_place(server: Running, page: Any) -> None:
    page.goto(server.url)
    call = {"index": 0, "function": {"name": "look_up", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Paris"}'}}
    answer_with(
        page, {"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "Here."},
        {"tool_calls": [call]}, {"tool_calls": [rest]},
    )  # fmt: skip
    say(page, "one")
    assert page.locator(".reasoning p").text_content() == "Let me see."
    assert page.locator(".reasoning p").is_hidden(), "closed when the answer begins"
    page.locator(".reasoning summary").click()
    assert page.locator(".reasoning p").is_visible()
    assert page.locator(".tool p").text_content() == "Calls look_up"
    assert json.loads(page.locator(".tool code").last.text_content()) == {"city": "Paris"}
    page.unroute("**/v1/chat/completions")
    answer_with(
        page, {"content": "<thi"}, {"content": "nk>Hm, "}, {"content": "so.</thi"}, {"content": "nk>\n\n**Yes**"}
    )
    say(page, "two", 2)
    assert page.locator(".reasoning p").last.text_content() == "Hm, so."
    assert page.locator(".markdown").last.text_content() == "Yes"
    page.reload()
    assert page.locator(".reasoning p").first.text_content() == "Let me see."


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


def test_markdown_that_grows_ends_as_the_whole_does(server: Running, page: Any) -> None:
    page.goto(server.url)
    whole, grown, kept_nodes = page.evaluate(
        """async (source) => {
          const { MarkdownStream, renderMarkdown } = await import("/console/markdown.js");
          const whole = document.createElement("div");
          whole.append(renderMarkdown(source));
          const grown = [1, 2, 7, 40, 1000].map((size) => {
            const element = document.createElement("div");
            const stream = new MarkdownStream(element);
            for (let at = 0; at < source.length; at += size) stream.append(source.slice(at, at + size));
            stream.end();
            return element.innerHTML;
          });
          const element = document.createElement("div");
          const stream = new MarkdownStream(element);
          stream.append("one\\n\\ntwo");
          const first = element.firstChild;
          for (let at = 0; at < 50; at += 1) stream.append("\\n\\nmore");
          return [whole.innerHTML, grown, [element.firstChild === first, element.childNodes.length]];
        }""",
        MARKDOWN,
    )
    for html in grown:
        assert html == whole
    assert kept_nodes == [True, 52], "blocks that are complete are not made again"
    for part in (
        "<h3>One</h3>",
        '<td style="text-align: right;">2</td>',
        '<span class="hl-keyword">def</span>',
        "&lt;b&gt;",
    ):
        assert part in whole, part
    assert 'href="https://example.org/ref"' in whole


def test_code_can_be_copied(server: Running, page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page.goto(server.url)
    answer_with(page, {"content": "See\n\n```js\nlet a = 1;\n```"})
    say(page, "code")
    page.locator(".code-head button").click()
    page.locator(".code-head").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "let a = 1;\n"
    press(page, "Copy", 0)
    page.locator(".user").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "code"
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as on a page over plain HTTP
    page.locator(".code-head button").click()
    page.locator(".code-head").get_by_text("Copied").wait_for()
    page.focus("#prompt")
    page.keyboard.press("Control+V")
    assert page.input_value("#prompt") == "let a = 1;\n"


def test_the_api_docs_need_no_other_server_and_can_try_a_route(server: Running, page: Any) -> None:
    page.goto(f"{server.url}/docs")
    page.get_by_text("/v1/chat/completions").first.wait_for()
    block = page.locator(".opblock").filter(has_text="/version").first
    block.locator("button.opblock-summary-control").click()
    block.get_by_role("button", name="Try it out").click()
    block.get_by_role("button", name="Execute").click()
    block.locator(".live-responses-table").get_by_text(__version__).first.wait_for()


def test_presets_are_kept_and_used(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, system="Talk like a pirate.", temperature=0.3)
    page.click("#controls-tab")
    page.click("#preset-save")
    page.fill("#ask-text", "Pirate")
    page.press("#ask-text", "Enter")
    page.locator("#preset-delete:enabled").wait_for()
    page.reload()
    set_to(page, system="", temperature="", top_p=0.5)
    page.click("#controls-tab")
    page.select_option("#preset", "Pirate")
    assert page.input_value("[name=system]") == "Talk like a pirate."
    assert (page.input_value("[name=temperature]"), page.input_value("[name=top_p]")) == ("0.3", "")
    page.click("#preset-delete")
    page.click("#ask-accept")
    page.locator("#preset-delete:disabled").wait_for()
    assert page.locator("#preset option").count() == 1


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


def everything_shown(page: Any, server: Running) -> None:
    """A page with every kind of message."""
    page.goto(server.url)
    set_up = {"reasoning": "Hm.", "content": MARKDOWN, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    answer_with(page, set_up)
    page.locator("#console").wait_for()
    say(page, "Show me all")
    page.locator(".tool").wait_for()
    press(page, "Regenerate")
    page.locator(".where").wait_for()
    page.locator("#send:visible").wait_for()


@pytest.mark.parametrize("width", [1440, 1000, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_nothing_sticks_out(server: Running, page: Any, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    everything_shown(page, server)
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


@pytest.mark.network
@pytest.mark.parametrize("width", [1440, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(server: Running, page: Any, axe: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    everything_shown(page, server)
    page.evaluate(axe)

    def check(what: str) -> None:
        page.wait_for_timeout(200)  # a drawer that is half transparent has no contrast
        found = page.evaluate("axe.run()")["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == [], what

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


def test_the_first_load_is_light(server: Running, page: Any) -> None:
    sizes: dict[str, int] = {}
    page.on("requestfinished", lambda request: sizes.update({request.url: len(request.response().body())}))
    page.goto(server.url)
    page.locator("#state[data-state=ready]").wait_for()
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    print(f"console: {sum(sizes.values()):,} bytes in {len(sizes)} requests, first paint after {paint} ms")
    assert sum(sizes.values()) < MAX_WEIGHT
    assert len(sizes) > len(SCRIPTS)


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
