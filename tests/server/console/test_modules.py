"""The console's code without a page, in node."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.messages.stats import Constraint
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


def test_a_gap_in_the_values_is_a_gap_in_the_line() -> None:
    runs = in_node("console.log(JSON.stringify(charts.runsOf([null, 1, 2, null, null, 0, null])));")
    assert runs == [[1, 2], [5, 5]]


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
