"""The console's code without a page, in node."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.messages.stats import Constraint
from quire.server.activity import RequestActivity
from tests.server.conftest import Running
from tests.server.console.conftest import FILES, in_node


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


@pytest.mark.parametrize(("width", "height"), [(296, 132), (500, 220), (10, 1)])
def test_the_page_map_is_full_and_true_to_scale(width: int, height: int) -> None:
    cases = [[1], [3, 3, 3, 1], [9999, 1, 1, 1], [5, 0, 7], [1] * 100, [2**number for number in range(16)], []]
    maps = in_node(
        f"const cases = {json.dumps(cases)};"
        f"console.log(JSON.stringify(cases.map((weights) => kvmap.areasOf(weights, {width}, {height}))));"
    )
    for weights, areas in zip(cases, maps, strict=True):
        for weight, area in zip(weights, areas, strict=True):
            assert (area is None) == (weight == 0)
            if area is not None:
                assert area["width"] * area["height"] == pytest.approx(weight / sum(weights) * width * height)
                assert -1e-9 <= area["x"] <= area["x"] + area["width"] <= width + 1e-6
                assert -1e-9 <= area["y"] <= area["y"] + area["height"] <= height + 1e-6
        boxes = [area for area in areas if area is not None]
        for index, one in enumerate(boxes):
            for other in boxes[:index]:
                across = min(one["x"] + one["width"], other["x"] + other["width"]) - max(one["x"], other["x"])
                down = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
                assert min(across, down) < 1e-6, "areas overlap"


def test_equal_parts_of_the_map_are_nearly_squares() -> None:
    areas = in_node("console.log(JSON.stringify(kvmap.areasOf(Array(40).fill(1), 300, 130)));")
    assert max(max(one["width"] / one["height"], one["height"] / one["width"]) for one in areas) < 2


def test_every_block_in_use_is_in_one_part_of_the_map() -> None:
    cases: list[tuple[dict[str, int], list[int]]] = [
        ({"shared": 0, "used": 0}, []),
        ({"shared": 2, "used": 9}, [4, 5]),
        ({"shared": 2, "used": 9}, [4]),
        ({"shared": 0, "used": 900}, [1] * 100),
        ({"shared": 0, "used": 3}, [4, 4]),
    ]
    for counts, own in cases:
        sequences = [{"id": f"r{number}", "name": f"s{number}", "own": blocks} for number, blocks in enumerate(own)]
        parts = in_node(f"console.log(JSON.stringify(kvmap.partsOf({json.dumps(counts)}, {json.dumps(sequences)})));")
        used = sum(part["blocks"] for part in parts if part["kind"] == "used")
        assert used == max(counts["used"], sum(own) if len(own) < 100 else 0)
        assert len({part["key"] for part in parts}) == len(parts) <= 103
        assert all(part["blocks"] > 0 for part in parts)


def test_axes_end_at_round_numbers_that_hold_every_value() -> None:
    tops = in_node("console.log(JSON.stringify([0, 0.03, 1, 1.1, 47, 50, 51, 999].map(charts.ceiling)));")
    assert tops == pytest.approx([1, 0.05, 1, 2, 50, 50, 100, 1000])


@pytest.mark.parametrize(("file", "table"), [("live.js", "const LIMITS"), ("timeline.js", "const LIMIT_NAMES")])
def test_every_limit_of_the_engine_has_words(file: str, table: str) -> None:
    text = (FILES / file).read_text(encoding="utf-8")
    table = text[text.index(table) : text.index("};", text.index(table))]
    for constraint in Constraint:
        assert re.search(rf'^  "?{constraint.value}"?: "', table, re.MULTILINE), constraint


def test_the_answer_to_why_and_the_live_view_have_the_same_stages(server: Running) -> None:
    headers = {"x-quire-why": "1"}
    body = {"prompt": "import os", "max_tokens": 3, "ignore_eos": True}
    (why,) = server.client.post("/v1/completions", json=body, headers=headers).json()["why"]
    stages = in_node(f"console.log(JSON.stringify(timeline.stagesOf({json.dumps(why)})));")
    assert [name for name, *_ in stages] == ["Received", "Queued", "Prompt", "Output", "Delivered"]
    assert sum(seconds for _, seconds, *_ in stages) == pytest.approx(why["total_s"], abs=1e-4)
    row = set(RequestActivity.__annotations__) & set(why) - {"prompt_tokens", "cached_tokens", "computed_tokens"}
    assert row == {"queue_s", "prefill_s", "decode_s", "preemptions", "replays", "prefill_steps", "queued_steps"}


def test_times_are_said_as_people_read_them() -> None:
    said = in_node("console.log(JSON.stringify([0, 0.0042, 0.05, 0.3, 9.96, 59.6, 61, 3600].map(timeline.duration)));")
    assert said == ["0.0 ms", "4.2 ms", "50 ms", "0.30 s", "10.0 s", "1 min 0 s", "1 min 1 s", "60 min 0 s"]


def test_other_names_of_languages_are_those_that_the_grammars_know() -> None:
    folder = (FILES / "vendor" / "highlight").as_uri()
    unknown = in_node(
        f"""
        const {{default: highlighter}} = await import("{folder}/core.min.js");
        for (const name of new Set(Object.values(code.ALIASES))) {{
          highlighter.registerLanguage(name, (await import(`{folder}/${{name}}.min.js`)).default);
        }}
        const is = ([alias, name]) => highlighter.getLanguage(alias) === highlighter.getLanguage(name);
        console.log(JSON.stringify(Object.entries(code.ALIASES).filter((one) => !is(one))));
        """
    )
    assert unknown == [["shell", "bash"]], "models mean commands by it, highlight.js a session"


def test_a_file_becomes_a_block_that_it_cannot_end() -> None:
    files = [{"name": "a.py", "text": "print()\n"}, {"name": "notes", "text": "```\n````"}]
    text = in_node(f"console.log(JSON.stringify(files.withFiles('Look', {json.dumps(files)})));")
    assert text == "Look\n\na.py:\n```py\nprint()\n```\n\nnotes:\n`````\n```\n````\n`````"
    assert in_node("console.log(JSON.stringify(files.withFiles('', [{name: 'a.md', text: 'x'}])));") == (
        "a.md:\n```md\nx\n```"
    )


def test_only_text_of_some_size_is_attached() -> None:
    large = "'x'.repeat((256 << 10) + 1)"
    contents = ("'text \u00e9'", "''", "new Uint8Array([255, 254])", "'a\0b'", large)
    made = ",".join(f"new File([{content}], '{number}.txt')" for number, content in enumerate(contents))
    result = in_node(f"console.log(JSON.stringify(await files.readFiles([{made}], 0)));")
    assert [file["name"] for file in result["read"]] == ["0.txt", "1.txt"]
    assert result["refused"] == [
        "2.txt is not a text file in UTF-8, so it cannot be attached.",
        "3.txt is not a text file in UTF-8, so it cannot be attached.",
        "4.txt has 257 KiB; at most 256 can be attached.",
    ]


def test_a_message_takes_eight_files() -> None:
    result = in_node(
        "const many = Array.from({length: 7}, (_, index) => new File(['x'], `${index}.txt`));"
        "console.log(JSON.stringify(await files.readFiles(many, 3)));"
    )
    assert len(result["read"]) == 5
    assert result["refused"] == ["A message takes 8 files; 2 were left out."]


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
        again.files = [{name: "a.txt", text: "x"}];
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
        "# one\n\n## System prompt\n\nBe brief.\n\n## You\n\none\nmore\n\n## Answer\n\n"
        "C\n\na.txt:\n```txt\nx\n```\n\nTool call: `f`"
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
