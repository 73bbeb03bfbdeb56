"""What calls a text may be read as, by readers that share nothing with the machine: `json`, `ast` and regular
expressions.

A reader finds every place in a text where a call of its family stands, whole but for closing markers, and says what
it is. A text that was damaged may be read as some of these calls, or as text, and as nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import json
import keyword
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from quire.message_formats.blocks import Blocks
from quire.message_formats.calls.function_gemma import GemmaCalls
from quire.message_formats.calls.json_calls import JsonCalls
from quire.message_formats.calls.named_json import NamedJson
from quire.message_formats.calls.nested_tags import NestedTags
from quire.message_formats.calls.pythonic import PythonicCalls
from quire.message_formats.calls.tagged import TaggedCalls
from quire.message_formats.formats import CALLS

Call = tuple[str, dict[str, Any]]
Finder = Callable[[str], Iterator[Call]]
_DECODER = json.JSONDecoder(strict=False)
_PAIRS = json.JSONDecoder(strict=False, object_pairs_hook=lambda pairs: pairs)


def calls_in(name: str, text: str) -> list[Call]:
    """The calls that stand in a text, in order; one that repeats a parameter is none."""
    calls = CALLS[name]
    calls = calls.calls if isinstance(calls, Blocks) else calls
    if isinstance(calls, JsonCalls):
        return list(_objects(calls, text))
    if isinstance(calls, NamedJson):
        named = list(_named(text, calls.is_numbered))
        return named if calls.objects is None else named + list(_objects(calls.objects, text))
    if isinstance(calls, PythonicCalls):
        with warnings.catch_warnings(action="ignore"):  # of backslashes that begin nothing
            return list(_python(text))
    if isinstance(calls, TaggedCalls):
        return list(_tagged(calls, text))
    if isinstance(calls, NestedTags):
        return list(_elements(calls.space, text))
    return list(_gemma(calls.quote, text) if isinstance(calls, GemmaCalls) else _harmony(text))


def _arguments(given: Any) -> dict[str, Any] | None:
    """Arguments as they are, or in a JSON string; none at all are an empty object."""
    try:
        given = json.loads(given, strict=False) if isinstance(given, str) and given.strip() else given
    except ValueError:
        return None
    return given if isinstance(given, dict) else {} if given is None or given == "" else None


def _objects(calls: JsonCalls, text: str) -> Iterator[Call]:
    for match in re.finditer(r"\{", text):
        try:
            pairs, _ = _PAIRS.raw_decode(text, match.start())
            value, _ = _DECODER.raw_decode(text, match.start())
        except ValueError:
            continue
        names = [value[key] for key, _ in pairs if key in ("name", "tool_name")]
        given = [value[key] for key, _ in pairs if key in ("arguments", "parameters", calls.arguments_key)]
        if not calls.name_key:
            names, given = list(value), list(value.values())
        arguments = _arguments(given[0]) if len(given) == 1 else {} if not given else None
        if len(names) == 1 and isinstance(names[0], str) and arguments is not None:
            yield names[0], arguments


def _named(text: str, is_numbered: bool) -> Iterator[Call]:
    for match in re.finditer(r'[{"]', text):
        try:
            value, _ = _DECODER.raw_decode(text, match.start())
        except ValueError:
            continue
        middle = r"\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\]|(?:<[^<>\s]*>(?:json)?)*)\s*(?:```json)?\s*$"
        before = re.search(r"""([^\s"'`,;(){}\[\]<>]+)""" + middle, text[max(0, match.start() - 400) : match.start()])
        arguments = _arguments(value)
        if before and arguments is not None:
            name = before[1]
            yield (re.sub(r"^functions\.|:[0-9]+$", "", name) if is_numbered else name), arguments


_CONSTANTS = {"true": True, "false": False, "null": None}


def _literal(node: ast.AST) -> Any:
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {_key(_literal(key)): _literal(value) for key, value in pairs if key is not None}
        case ast.List() | ast.Tuple():
            return [_literal(one) for one in node.elts]
        case ast.Constant(value=str() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return ast.literal_eval(node)
    raise ValueError(node)


_RESERVED = re.compile(rf"\b({'|'.join(keyword.kwlist)})\s*=(?=[^=])")


def _key(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _python(text: str) -> Iterator[Call]:
    for match in re.finditer(r"\b[\w.-]+\(", text):
        for end in (end.end() for end in re.finditer(r"\)", text) if end.start() >= match.end()):
            try:
                inside = re.sub(_RESERVED, r"_\1=", text[match.end() : end])  # some tools have such names
                call = ast.parse(f"f({_one_line(inside)}", mode="eval").body
                assert isinstance(call, ast.Call)
                keys = [one.arg for one in call.keywords]
                values = {re.sub("^_", "", str(one.arg)): _literal(one.value) for one in call.keywords}
            except (SyntaxError, ValueError, AssertionError):
                continue
            if not call.args and len(values) == len(keys) and isinstance(call.func, ast.Name):
                yield match[0][:-1], values
            break


def _one_line(text: str) -> str:
    """Line breaks inside of texts as Python wants them."""
    return text if '"""' in text else text.replace("\n", "\\n")


def _tagged(calls: TaggedCalls, text: str) -> Iterator[Call]:
    """As the parser that Qwen publishes reads: a value ends at its tag, at the next parameter, and at the end of the
    call. One whose values hold a tag inside a line is read to the letter as well: a text may quote it."""
    number = rf"(?:{re.escape(calls.index)}[0-9]*)?" if calls.index else ""
    head = re.escape(calls.name[0] or calls.begin) + r"\s*([\w.:/$@+-]*)" + number + re.escape(calls.name[1])
    end = re.escape(calls.call_end or calls.end)
    key, key_end = map(re.escape, calls.key)
    kind = f"({'|'.join(re.escape(kind) for kind, _ in calls.kinds)})" if calls.kinds else ""
    type_of = rf"(?:\s*{re.escape(calls.type_of[0])}(?s:.*?){re.escape(calls.type_of[1])})?" if calls.type_of else ""
    opening = rf"{key}([^<>\"\n]*){key_end}{type_of}{kind}" + (
        rf"\s*{re.escape(calls.value[0])}" if calls.value[0] else ""
    )
    at_line = rf"(?:^|\n)\s*{key}" if calls.line else key
    closed = rf"(?s:(.*?)){re.escape(calls.value[1])}"
    if calls.cdata is not None:
        begin, stop = map(re.escape, calls.cdata)
        closed = rf"(?s:({begin}.*?{stop}|.*?)){re.escape(calls.value[1])}"
    lenient = rf"(?s:(.*?))(?:{re.escape(calls.value[1])}|(?=\s*{opening})|(?=\s*{end}))"
    for match in re.finditer(head, text):
        if calls.objects is not None and text[match.end() :].lstrip().startswith("{"):
            yield from list(_objects(calls.objects, text[match.end() :]))[:1]
        for value in (lenient, closed):
            found = re.compile(rf"\s*{opening}{value}").match
            at, values, is_good = match.end(), list[tuple[str, Any]](), True
            while one := found(text, at):
                at = one.end()
                body = one[one.re.groups if value is closed else 2 + bool(kind)]
                is_quoted = calls.cdata is not None and body.startswith(calls.cdata[0])
                is_good = is_good and not (value is closed and not is_quoted and re.search(at_line, body))
                values.append((one[1].strip(), _value(calls, one[1].strip(), one[2] if kind else "", body)))
            is_whole = re.compile(rf"\s*{end}").match(text, at) is not None
            if is_good and is_whole and len(dict(values)) == len(values):
                yield match[1], dict(values)


TEXTS = ("city", "unit")
"""Parameters that are always texts."""


def _value(calls: TaggedCalls, key: str, kind: str, body: str) -> Any:
    if calls.margin:
        body = body.removeprefix(calls.margin).removesuffix(calls.margin)
    if calls.cdata is not None and body.startswith(calls.cdata[0]):
        body = body.removeprefix(calls.cdata[0]).removesuffix(calls.cdata[1])
    is_text = key in TEXTS if not kind else kind.startswith(("true", "string"))
    if is_text:
        return body
    return _any_value(body)


def _elements(space: str, text: str) -> Iterator[Call]:
    """With another way to write tags it is XML. What two tags of a text stand around is one, whatever it quotes."""
    mark, hidden = re.escape(space), "\0"
    for match in re.finditer(mark + r'<invoke name="([\w.:/$@+-]*)">', text):
        body, _, _ = text[match.end() :].partition(f"{space}</invoke>")
        for name in TEXTS:
            inside = rf"({mark}<{name}>)(?s:(.*?))({mark}</{name}>)"
            body = re.sub(inside, lambda one: one[1] + one[2].replace(space, hidden) + one[3], body)
        pieces = re.split(rf"{mark}<(/?)([^<>/\s][^<>\n]*)>", body)
        tags = [
            "</e>" if slash else f"<e name={quoteattr(name)}>"
            for slash, name in zip(pieces[1::3], pieces[2::3], strict=True)
        ]
        texts = [escape(piece.replace(hidden, space)) for piece in pieces[::3]]
        try:
            root = ElementTree.fromstring(
                f"<r>{texts[0]}{''.join(map(''.join, zip(tags, texts[1:], strict=True)))}</r>"
            )
            yield match[1], _properties(root)
        except (ElementTree.ParseError, ValueError):
            continue


def _properties(element: ElementTree.Element) -> dict[str, Any]:
    pairs = [(child.attrib["name"], _element(child)) for child in element]
    text = "".join([element.text or "", *(child.tail or "" for child in element)])
    if len(dict(pairs)) < len(pairs) or text.strip():
        raise ValueError
    return dict(pairs)


def _element(element: ElementTree.Element) -> Any:
    name, text = element.attrib["name"], element.text or ""
    if len(element) and {child.attrib["name"] for child in element} == {"item"} and name != "options":
        return [_element(child) for child in element]
    if len(element):
        return _properties(element)
    if name in TEXTS or not text.strip():
        return {"tags": [], "options": {}}.get(name, text)
    return _any_value(text)


def _any_value(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(text, strict=False)
    if re.search(r"\w[\"']\s*[\"']", text) is None:  # Python makes one text of two
        with contextlib.suppress(ValueError, SyntaxError):
            return _literal(ast.parse(text.strip(), mode="eval").body)
    return text


def _gemma(quote: str, text: str) -> Iterator[Call]:
    """With texts in quotes and keys in quotes it is JSON."""
    texts = re.escape(quote)
    for match in re.finditer(r"call:\s*([\w.:/$@+-]*)\s*\{", text):
        pieces = re.split(f"({texts}(?s:.*?){texts})", text[match.end() - 1 :])
        spelled = [
            json.dumps(piece[len(quote) : -len(quote)]) if index % 2 else _words(piece)
            for index, piece in enumerate(pieces)
        ]
        try:
            pairs, _ = _PAIRS.raw_decode("".join(spelled))
            value, _ = _DECODER.raw_decode("".join(spelled))
        except ValueError:
            continue
        if len(pairs) == len(value):
            words = {key: json.dumps(one) for key, one in value.items() if isinstance(one, int | float)}
            yield match[1], {**value, **{key: one for key, one in words.items() if key in TEXTS}}


def _words(text: str) -> str:
    text = re.sub(r"([{,]\s*)([^\s\",:{}\[\]<>]+)(\s*:)", r'\1"\2"\3', text)
    text = re.sub(r"(?<=[:\[,])(\s*)(None|True|False)\b", lambda m: m[1] + json.dumps(ast.literal_eval(m[2])), text)
    known = {"true", "false", "null"}

    def quoted(match: re.Match[str]) -> str:
        is_json = match[2] in known or re.fullmatch(r"-?[0-9.]+(?:[eE][-+]?[0-9]+)?", match[2])
        return match[0] if is_json else match[1] + json.dumps(match[2])

    return re.sub(r"([:\[,]\s*)([^\s\",:{}\[\]<>][^\",:{}\[\]<>\n]*)", quoted, text)


def _harmony(text: str) -> Iterator[Call]:
    header = r"to=(?:functions\.)?([^\s<]*)(?:[^<]|<\|(?:constrain|channel)\|>)*<\|message\|>"
    for match in re.finditer(header, text):
        body = re.split(r"<\|(?:end|call|return|start)\|>", text[match.end() :])[0]
        try:
            value = json.loads(body)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield match[1], value
