import json
import tracemalloc
from collections.abc import Iterator

import pytest

from quire.errors import InvalidParameter
from quire.tokenizer import conversation
from quire.tokenizer.chat import ChatTemplate
from quire.utils.cancellation import cancelled_by, check_cancelled
from tests.tokenizer import templates

USER = {"role": "user", "content": "hi"}
TEMPLATE = ChatTemplate(templates.CHATML)


class Key(str):
    """A key that must not be written into a path."""

    def __format__(self, _: str) -> str:
        raise AssertionError("a path was built although nothing is wrong")


class Unwalkable(list[object]):
    """A list that must be refused for its length."""

    def __iter__(self) -> Iterator[object]:
        raise AssertionError("it was walked before it was counted")


def nested(key: str, depth: int, innermost: object) -> object:
    value = innermost
    for _ in range(depth):
        value = {key: value}
    return value


def test_no_path_is_built_while_nothing_is_wrong() -> None:
    message = {Key("role"): "user", Key("content"): "hi", Key("extra"): nested(Key("k"), 50, [{Key("k"): 1}])}
    tool = {Key("function"): nested(Key("k"), 20, [1, 2])}
    assert TEMPLATE.render([message], tools=[tool], documents=[tool], extra=nested(Key("x"), 9, [])).endswith("\n")


@pytest.mark.parametrize("depth", [1, 10, 60])
def test_the_path_in_an_error_is_cut_and_long_keys_are_never_quoted_in_full(depth: int) -> None:
    key = "k" * conversation.MAX_KEY_CHARACTERS
    with pytest.raises(InvalidParameter, match="JSON types") as caught:
        TEMPLATE.render([USER, {**USER, "extra": nested(key, depth, object())}])
    assert caught.value.parameter.startswith("messages[1].extra.kkk")
    assert len(caught.value.parameter) <= conversation.MAX_PATH_CHARACTERS
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_errors_in_tools_and_documents_name_the_place(name: str) -> None:
    with pytest.raises(InvalidParameter, match="JSON types") as caught:
        TEMPLATE.render([USER], **{name: [{}, {"a": [1, {"b": object()}]}]})  # type: ignore[arg-type]
    assert caught.value.parameter == f"{name}[1].a[1].b"


def test_lists_are_refused_for_their_length_before_they_are_walked() -> None:
    many = Unwalkable([USER] * (conversation.MAX_MESSAGES + 1))
    with pytest.raises(InvalidParameter, match="messages has 4097 items; the limit is 4096"):
        TEMPLATE.render(many)  # type: ignore[arg-type]
    objects = Unwalkable([{}] * (conversation.MAX_OBJECTS + 1))
    for name in ("tools", "documents"):
        with pytest.raises(InvalidParameter, match=f"{name} has 1025 items; the limit is 1024"):
            TEMPLATE.render([USER], **{name: objects})  # type: ignore[arg-type]
    values = Unwalkable([0] * conversation.MAX_VALUES)
    with pytest.raises(InvalidParameter, match="more than 100000 values"):
        TEMPLATE.render([{**USER, "extra": values}])
    with pytest.raises(InvalidParameter, match="more than 100000 values"):
        TEMPLATE.render([USER], extra=values)


def test_values_are_counted_over_the_whole_conversation() -> None:
    share = [0] * (conversation.MAX_VALUES // 4)
    ChatTemplate("x").render([{**USER, "a": share}], documents=[{"a": share}], extra=share)
    with pytest.raises(InvalidParameter, match="more than 100000 values"):
        ChatTemplate("x").render([{**USER, "a": share}, {**USER, "a": share}], documents=[{"a": share}], extra=share)


def test_a_message_has_a_limited_number_of_parts_and_keys_a_limited_length() -> None:
    with pytest.raises(InvalidParameter, match=r"messages\[0\].content has 4097 parts; the limit is 4096"):
        TEMPLATE.render([{"role": "user", "content": ["x"] * (conversation.MAX_PARTS + 1)}])
    with pytest.raises(InvalidParameter, match=r"messages\[0\].a has a key of 1025 characters"):
        TEMPLATE.render([{**USER, "a": {"k" * 1025: 1}}])
    with pytest.raises(InvalidParameter, match="chat_template_kwargs has a key of 1025 characters"):
        TEMPLATE.render([USER], **{"k" * 1025: 1})
    with pytest.raises(InvalidParameter, match="chat_template_kwargs has 1025 items"):
        TEMPLATE.render([USER], **{f"k{i}": 1 for i in range(1025)})


@pytest.mark.parametrize(
    "arguments", ["[" + "{}," * 500_000 + "{}]", "[" * 2_000_000, '{"a":' * 1_000_000, "[" + '"",' * 500_000 + "1]"]
)
def test_tool_arguments_are_counted_before_they_are_parsed(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidParameter, match="more than 100000 values") as caught:
            TEMPLATE.render([USER, {"role": "assistant", "tool_calls": [call]}])
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert caught.value.parameter == "messages[1].tool_calls[0].function.arguments"


def test_punctuation_inside_the_texts_of_tool_arguments_does_not_count() -> None:
    for text in (",[{:" * 100_000, '\\"' * 200_000, "\\" * 100_000 + '",' * 60_000):
        call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"text": text})}}
        assert TEMPLATE.render([USER, {"role": "assistant", "tool_calls": [call]}])


def test_long_refusals_of_a_template_are_cut() -> None:
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}")
    with pytest.raises(InvalidParameter, match="refuses this conversation") as caught:
        template.render([{"role": "user", "content": "long " * 100_000}])
    assert len(caught.value.message) < 3000


# Cancellation


class Left(BaseException):
    """What a caller raises when its client has left."""


@pytest.mark.parametrize(
    ("source", "messages", "protect"),
    [
        ("x", [{**USER, "extra": [0] * 5_000}], ()),
        ("x", [USER] * 4_000, ()),
        ("x", [{**USER, "content": "<" * 200_000}], ("<s>",)),
        ("{% for i in range(9999) %}{% endfor %}", [USER], ()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [USER] * 250, ()),
        ("{% set x = range(99999) | list %}{{ x == x }}", [USER], ()),
    ],
)
def test_a_conversation_whose_client_left_is_given_up(
    source: str, messages: list[dict[str, object]], protect: tuple[str, ...]
) -> None:
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise Left

    with pytest.raises(Left), cancelled_by(check):
        ChatTemplate(source).render(messages, protect=protect)
    assert asked == 2


def test_an_inner_check_does_not_hide_the_outer_one() -> None:
    asked: list[str] = []
    with cancelled_by(lambda: asked.append("outer")):
        with cancelled_by(lambda: asked.append("inner")):
            check_cancelled()
        check_cancelled()
    check_cancelled()
    assert asked == ["outer", "inner", "outer"]
