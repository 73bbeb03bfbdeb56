import copy
import random
from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.tokenizer import special_text
from quire.tokenizer.chat import ChatTemplate, chat_prompt
from quire.tokenizer.special_text import marked, turn_marks, with_marks
from quire.tokenizer.tokenizer import MARK_END, MARK_START, without_marks
from tests.tokenizer import templates
from tests.tokenizer.trained import SPECIALS, tokenizer

SPECIAL_IDS = frozenset(range(len(SPECIALS)))
WAYS_OUT = """\
{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{{ m.name }}{{ m.tool_calls }}{{ m.extra | tojson }}\
{{ m.extra | tojson(ensure_ascii=true) }}{{ m.extra ~ '' }}{{ '%s' % m.extra }}{{ '%r' % m.content }}\
{{ m.extra | string }}{{ '{!r}{}'.format(m.content, m.extra) }}{{ [m.extra] | join }}{{ m.content | lower }}\
{{ m.content | upper }}{{ m.content | trim }}{{ m.content | trim }}{{ m.content | replace('q', 'k') }}\
{{ m.extra | upper }}{{ m.extra.items() }}{% if m.extra is mapping %}{% for key, value in m.extra | dictsort %}\
{{ key }}{{ value }}{{ key | trim }}{% endfor %}{% endif %}{% endfor %}\
{{ tools }}{{ tools | tojson(indent=2) }}{{ documents }}{{ extra }}{{ reasoning_effort }}{{ bos_token }}"""
TEMPLATES = {**{name: source for name, source in templates.ALL.items() if name != "training"}, "ways out": WAYS_OUT}
"""Without the one that refuses each of these conversations."""


def special_ids(source: str, request: dict[str, Any]) -> list[int] | None:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", special_tokens={"unk_token": "<unk>"})
    try:
        _, ids = chat_prompt(template, tokenizer("byte_level"), **copy.deepcopy(request))
    except InvalidParameter:
        return None
    return [token_id for token_id in ids if token_id in SPECIAL_IDS]


class Writer:
    """Random requests whose texts hold special tokens, or harmless text of the same shape."""

    def __init__(self, seed: int, harmless: bool) -> None:
        self.rng, self.harmless = random.Random(seed), harmless

    def text(self) -> str:
        pieces = []
        for _ in range(self.rng.randrange(1, 4)):
            token = self.rng.choice(
                [*SPECIALS, "<|im_", "end|>", "</S>", "<|IM_END|>", "<", "s>", "word", " ", "\n", "\\"]
            )
            pieces.append("x" * len(token) if self.harmless and set(token) & set("<>") else token)
        return "".join(pieces)

    def value(self, depth: int = 2) -> object:
        kind = self.rng.randrange(4 if depth else 2)
        if kind < 2:
            return self.text()
        if kind == 2:
            return [self.value(depth - 1) for _ in range(self.rng.randrange(3))]
        return self.object(depth - 1)

    def object(self, depth: int = 2) -> dict[str, object]:
        return {
            f"{i}{self.text()}{i}" if self.rng.random() < 0.5 else self.text() + str(i): self.value(depth)
            for i in range(3)
        }

    def request(self) -> dict[str, Any]:
        call = {"id": self.text(), "type": "function", "function": {"name": self.text(), "arguments": self.object()}}
        messages = [
            {"role": "user", "content": self.text(), "name": self.text(), "extra": self.object()},
            {"role": "assistant", "content": self.text(), "tool_calls": [call], "reasoning": self.text()},
            {"role": "tool", "content": self.text(), "tool_call_id": self.text()},
        ]
        tools = [{"type": "function", "function": {"name": self.text(), "parameters": self.object()}}]
        return {
            "messages": messages[: self.rng.choice((1, 3))],
            "tools": tools if self.rng.random() < 0.5 else None,
            "documents": [{**self.object(), "title": self.text(), "text": self.text()}],
            "extra": self.value(),
            "reasoning_effort": self.text(),
        }


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_no_text_of_a_request_becomes_a_special_token(source: str) -> None:
    num_rendered = 0
    for seed in range(60):
        attack = special_ids(source, Writer(seed, harmless=False).request())
        harmless = special_ids(source, Writer(seed, harmless=True).request())
        assert attack == harmless, seed
        num_rendered += harmless is not None
    assert num_rendered > 10


@pytest.mark.parametrize("place", ["tool_calls", "documents", "tools", "message", "kwargs", "argument text"])
def test_special_tokens_in_keys_are_text(place: str) -> None:
    keys = {"<|im_end|>": {"</s>": [{"<|im_start|>": 1}]}}
    arguments: object = '{"<|im_end|>": 1}' if place == "argument text" else keys
    request: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if place in ("tool_calls", "argument text"):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        request["messages"] += [{"role": "assistant", "content": "", "tool_calls": [call]}]
    elif place == "message":
        request["messages"][0]["extra"] = keys
    elif place == "kwargs":
        request["extra"] = keys
    else:
        request[place] = [{"type": "function", "function": keys}]
    source = "{{ messages | tojson }}{{ tools | tojson }}{{ documents | tojson }}{{ [extra] }}"
    assert special_ids(source, request) == []


def test_parts_of_a_token_in_texts_side_by_side_stay_text() -> None:
    messages = [{"role": "user", "content": "a<|im_ ", "name": "\n end|>"}]
    assert special_ids("{{ messages[0].content | trim }}{{ messages[0].name | trim }}", {"messages": messages}) == []


def test_a_special_token_that_the_template_builds_around_a_role_is_special() -> None:
    source = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}{% if m == 'im_start' %}{% endif %}"
    request = {"messages": [{"role": "im_start", "content": "<|im_start|>"}]}
    assert special_ids(source, request) == [SPECIALS.index("<|im_start|>")]


def test_marks_cannot_be_sent_in_keys_or_names() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ tools }}")
    sent = {"role": "user", f"con{MARK_START}tent": 5, "content": f"a{MARK_END}b"}
    assert template.render([sent]) == "abNone"
    with pytest.raises(InvalidParameter, match="may not set: tools"):
        template.render([sent], **{f"to{MARK_START}ols": "x"})


def test_keys_without_special_text_and_ordinary_texts_are_unchanged() -> None:
    value = {"role": "system", "content": "a < b > c\n", "function": [1, None, {"name": "end", "type": "s"}]}
    assert marked(value, SPECIALS) == value


def test_escapes_that_a_caller_wrote_stay_text() -> None:
    for text in ("\\ufdd0", "\\\\ufdd0", "a\\ufdd1<|im_end|>\\ufdd0"):
        request = {"role": "user", "content": text}
        rendered = ChatTemplate("{{ messages | tojson(ensure_ascii=true) }}").render([request], protect=SPECIALS)
        plain = ChatTemplate("{{ messages | tojson(ensure_ascii=true) }}").render([request])
        assert without_marks(rendered) == plain
    assert with_marks("'\\ufdd0x\\ufdd1' \\\\ufdd0") == f"'{MARK_START}x{MARK_END}' \\\\ufdd0"


def test_marks_are_the_same_however_the_text_is_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    bits = [*SPECIALS, "<|im_", "<", "x", MARK_START, MARK_END, f"{MARK_START}</s>{MARK_END}"]
    texts = ["".join(rng.choices(bits, k=rng.randrange(60))) for _ in range(300)]
    whole = [(marked(text, SPECIALS), turn_marks(text, SPECIALS)) for text in texts]
    for size in (1, 2, 7, 30):
        monkeypatch.setattr(special_text, "PIECE_CHARACTERS", size)
        assert [(marked(text, SPECIALS), turn_marks(text, SPECIALS)) for text in texts] == whole


def test_the_longest_special_token_wins() -> None:
    assert turn_marks("<a><ab><abc>", ["<a>", "<ab", "<ab>", "<abc>"]) == "".join(
        f"{MARK_START}{token}{MARK_END}" for token in ("<a>", "<ab>", "<abc>")
    )
