"""What the browser keeps: conversations with their versions, and presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.conftest import Running, stand_in, wait_for
from tests.server.console.conftest import HOSTILE, kept, press, say, set_to, shown


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


def test_what_is_sent_before_the_conversations_are_read_stays_on_the_screen(server: Running, page: Any) -> None:
    page.goto(server.url)
    set_to(page, max_tokens=4)
    say(page, "earlier")
    page.add_init_script(
        """
        const open = IDBFactory.prototype.open;
        IDBFactory.prototype.open = function (...given) {
          const real = open.apply(this, given);
          const slow = {get result() { return real.result; }, get error() { return real.error; }};
          real.onupgradeneeded = () => slow.onupgradeneeded();
          real.onsuccess = () => { globalThis.openNow = () => slow.onsuccess(); };
          return slow;
        };
        """
    )
    page.reload()
    page.locator("#console").wait_for()
    page.fill("#prompt", "at once")
    page.press("#prompt", "Enter")
    page.locator("article.user").get_by_text("at once").wait_for()
    wait_for(lambda: page.evaluate("Boolean(globalThis.openNow)"))
    page.evaluate("openNow()")
    page.locator(".summary").wait_for()
    page.locator("#conversation-list button").nth(1).wait_for()
    assert page.locator("#conversation-list button").all_text_contents() == ["at once", "earlier"]
    assert page.locator("article.user .output").all_text_contents() == ["at once"]
    wait_for(lambda: sorted(one["title"] for one in kept(page)) == ["at once", "earlier"])
