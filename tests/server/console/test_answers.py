"""Answers on the page: text, tokens, Markdown, code, reasoning, errors; stopping and going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.conftest import MODEL, Running, stand_in, wait_for
from tests.server.console.conftest import HOSTILE, MARKDOWN, answer_with, kept, press, say, set_to


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
    page.locator("article .error").last.wait_for()
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


def test_markdown_that_grows_ends_as_the_whole_does(server: Running, page: Any) -> None:
    page.goto(server.url)
    whole, grown, kept_nodes = page.evaluate(
        """async (source) => {
          const { MarkdownStream, renderMarkdown } = await import("/console/markdown.js");
          await (await import("/console/code.js")).loadLanguage("python");
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


def test_each_answer_tells_where_its_time_went(server: Running, page: Any) -> None:
    page.goto(server.url)
    for number, mode in enumerate(("chat", "completion"), 1):
        set_to(page, mode=mode, max_tokens=4)
        say(page, "import os", number)
        page.locator("details.summary > summary").last.click()
        terms = page.locator("details.summary").last.locator("dt").all_text_contents()
        assert terms[:5] == ["Received", "Queued", "Prompt", "Output", "Delivered"]
    page.reload()
    page.locator("details.summary").nth(1).wait_for()


def test_text_files_go_along_with_a_message(server: Running, page: Any, tmp_path: Path) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    (tmp_path / "a.py").write_text("print(1)\n", encoding="utf-8")
    (tmp_path / "bad.bin").write_bytes(b"\xff\x00")
    page.goto(server.url)
    set_to(page, max_tokens=4)
    page.set_input_files("#attach-file", [tmp_path / "a.py", tmp_path / "bad.bin"])
    page.get_by_text("bad.bin is not a text file in UTF-8").wait_for()
    dropped = page.evaluate_handle(
        """() => {
          const data = new DataTransfer();
          for (const name of ["b.md", "c.txt"]) data.items.add(new File(["# " + name], name));
          return data;
        }"""
    )
    page.dispatch_event("#playground", "drop", {"dataTransfer": dropped})
    page.get_by_role("button", name="Remove b.md").click()
    assert page.locator("#files .chip").count() == 2
    page.fill("#prompt", "")
    page.press("#prompt", "Enter")
    page.locator(".summary").wait_for()
    content = "a.py:\n```py\nprint(1)\n```\n\nc.txt:\n```txt\n# c.txt\n```"
    assert sent[0]["messages"] == [{"role": "user", "content": content}]
    assert page.locator("#files .chip").count() == 0
    page.reload()
    page.locator(".user .chip").nth(1).wait_for()
    assert page.locator("#title").text_content() == "a.py"
    press(page, "Edit", 0)
    page.fill(".edit textarea", "Explain")
    page.press(".edit textarea", "Enter")
    page.locator("article.user .where").get_by_text("2/2").wait_for()
    page.locator("#send:visible").wait_for()
    assert sent[1]["messages"] == [{"role": "user", "content": f"Explain\n\n{content}"}]


def test_files_come_back_with_a_question_that_got_no_answer(server: Running, page: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    page.goto(server.url)
    set_to(page, temperature=9)
    page.set_input_files("#attach-file", tmp_path / "a.txt")
    page.locator("#files .chip").wait_for()
    say(page, "hi")
    assert page.locator("#files .chip").count() == 1
