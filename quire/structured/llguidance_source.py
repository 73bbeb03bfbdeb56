"""What a request asks for as a grammar in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from llguidance import StructTag, regex_to_lark

from quire.errors import InvalidParameter, UnsupportedFeature, shown
from quire.structured.ebnf import is_ebnf, lark_of
from quire.structured.grammar import Grammar
from quire.structured.json_expression import OPTIONS, WHITE_SPACE, json_expression, with_options
from quire.structured.json_schema import JsonSchema, parse_json, refusal
from quire.structured.lark import checked_lark
from quire.structured.params import PLACE, StructuredOutputsParams
from quire.structured.regex import json_space, translated

_OPTIONS = '%llguidance {"no_forcing": true}'
"""Every spelling of a text in tokens is allowed. Otherwise the library allows only one where a text has no alternative,
and for that it would need the tokenizer."""
_TAG = f"{PLACE}.structural_tag"


def grammar_of(params: StructuredOutputsParams) -> Grammar:
    """The grammar of what a request asks for.

    Raises: InvalidParameter naming the JSON pointer; UnsupportedFeature.
    """
    return Grammar(text=f"{_OPTIONS}\n{_TEXTS[params.kind](params)}")


def _of_json(params: StructuredOutputsParams) -> str:
    schema = JsonSchema(parse_json(f"{PLACE}.json", str(params.json)))
    schema.check()
    return _of_schema(schema, params)


def _of_object(params: StructuredOutputsParams) -> str:
    return _of_schema(JsonSchema({"type": "object"}, f"{PLACE}.json_object"), params)


def _of_schema(schema: JsonSchema, params: StructuredOutputsParams) -> str:
    if params.disable_additional_properties:
        _close(schema)
    return f"start: {json_expression(schema, _options(params))}"


def _options(params: StructuredOutputsParams) -> Mapping[str, Any]:
    if params.disable_any_whitespace:
        others = {name: value for name, value in OPTIONS.items() if name != "whitespace_pattern"}
        return {"whitespace_flexible": False, **others}
    own = params.whitespace_pattern
    return (
        {**OPTIONS, "whitespace_pattern": json_space(own, partial(_refused, "whitespace_pattern"))} if own else OPTIONS
    )


def _close(schema: JsonSchema) -> None:
    """Allow no further properties where a schema says nothing about them. Mutates schema."""
    for node in schema.nodes:
        if isinstance(node.schema, dict) and "properties" in node.schema:
            node.schema.setdefault("additionalProperties", False)


def _of_regex(params: StructuredOutputsParams) -> str:
    pattern = translated(str(params.regex), partial(_refused, "regex"))
    pattern = regex_to_lark(pattern, use_ascii="")  # as in Python
    return f"start: /{pattern}/"


def _refused(name: str, why: str) -> InvalidParameter:
    return InvalidParameter(f"{PLACE}.{name}: {why}", parameter=f"{PLACE}.{name}")


def _of_choice(params: StructuredOutputsParams) -> str:
    choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice or ())
    # The one character that must be escaped in Lark, but not in JSON.
    return f"start: {choices}".replace("\x7f", "\\u007f")


def _of_grammar(params: StructuredOutputsParams) -> str:
    text = str(params.grammar)
    return checked_lark(lark_of(text) if is_ebnf(text) else text)


def _of_tag(params: StructuredOutputsParams) -> str:
    raw = parse_json(_TAG, str(params.structural_tag))
    if not isinstance(raw, dict) or "format" in raw:
        raise UnsupportedFeature(
            _TAG + ': only {"structures": [...], "triggers": [...]} is supported, not the form with "format"',
            parameter=_TAG,
        )
    return StructTag.to_grammar(_tags(raw), assume_special=False)


def _tags(raw: dict[str, Any]) -> list[StructTag]:
    structures, triggers = raw.get("structures"), raw.get("triggers")
    for name, value in (("structures", structures), ("triggers", triggers)):
        if not isinstance(value, list) or not value:
            raise refusal(_TAG, f"#/{name}", "it must be an array, not empty")
    for index, trigger in enumerate(triggers or ()):
        if not isinstance(trigger, str) or not trigger:
            raise refusal(_TAG, f"#/triggers/{index}", f"it must be a string, not empty; got {shown(trigger)}")
    unknown = raw.keys() - {"type", "structures", "triggers"}
    if unknown:
        raise refusal(_TAG, f"#/{min(unknown)}", "there is no such field")
    tags = [_tag(f"#/structures/{index}", one, triggers) for index, one in enumerate(structures or ())]
    for index, trigger in enumerate(triggers or ()):
        if not any(tag.begin.startswith(trigger) for tag in tags):
            raise refusal(_TAG, f"#/triggers/{index}", f"no structure begins with {shown(trigger)}")
    return tags


def _tag(pointer: str, one: Any, triggers: Any) -> StructTag:
    """A structure, with the first of its triggers to be complete: behind that a part has begun."""
    if not isinstance(one, dict) or not {"begin", "schema"} <= one.keys() <= {"begin", "schema", "end"}:
        raise refusal(_TAG, pointer, "it must be an object with begin, schema and end")
    begin, end = one["begin"], one.get("end", "")
    known = [one for one in triggers if str(begin).startswith(one)]
    if not isinstance(begin, str) or not isinstance(end, str) or not known:
        raise refusal(_TAG, pointer, "begin and end must be strings, and begin must start with a trigger")
    schema = JsonSchema(one["schema"], _TAG)
    schema.check()
    bounded = with_options(schema, {"whitespace_pattern": WHITE_SPACE})
    return StructTag(trigger=min(known, key=len), begin=begin, grammar=bounded, end=end)


_TEXTS = {
    "json": _of_json,
    "json_object": _of_object,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": _of_grammar,
    "structural_tag": _of_tag,
}
