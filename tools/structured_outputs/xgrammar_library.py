"""xgrammar, as vLLM calls it: what vLLM refuses beforehand, how it compiles, and the masks.

xgrammar is no dependency of quire: have it on the path. Each schema is judged in a child process, for some take very
long to compile.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.structured.backend import mask_words
from quire.structured.grammar import Vocabulary

MAX_THREADS = 8
"""Of its compiler, as vLLM has it."""
PATIENCE_S = 30.0
_TIMES = ("date", "time", "date-time", "duration")
_NAMES = ("email", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference", "uri-template")
KNOWN_FORMATS = frozenset((*_TIMES, *_NAMES, "json-pointer", "relative-json-pointer"))
LENGTHS = frozenset(("minLength", "maxLength"))
PATTERNS = frozenset(("pattern", "format"))
_REFUSED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "integer": lambda schema: "multipleOf" in schema,
    "number": lambda schema: "multipleOf" in schema,
    "array": lambda schema: not schema.keys().isdisjoint(("uniqueItems", "contains", "minContains", "maxContains")),
    "string": lambda schema: schema.get("format", "date") not in KNOWN_FORMATS or _has_both(schema),
    "object": lambda schema: _has_names(schema) or _has_patterns(schema),
}


def _has_both(schema: dict[str, Any]) -> bool:
    return not schema.keys().isdisjoint(LENGTHS) and not schema.keys().isdisjoint(PATTERNS)


def _has_names(schema: dict[str, Any]) -> bool:
    """`propertyNames` beside what else says something about properties, or with both kinds of bounds itself."""
    if "propertyNames" not in schema:
        return False
    names = schema["propertyNames"]
    beside = "properties" in schema or "patternProperties" in schema
    others = (
        isinstance(schema.get("additionalProperties"), dict) or schema.get("unevaluatedProperties", True) is not True
    )
    return beside or others or (isinstance(names, dict) and _has_both(names))


def _has_patterns(schema: dict[str, Any]) -> bool:
    patterns = schema.get("patternProperties")
    return isinstance(patterns, dict) and (len(patterns) > 1 or "properties" in schema)


def is_refused_by_vllm(schema: Any) -> bool:
    """Whether vLLM says that xgrammar lacks something that a schema asks for (release 0.32's rules)."""
    if isinstance(schema, list):
        return any(is_refused_by_vllm(one) for one in schema if isinstance(one, dict))
    if not isinstance(schema, dict):
        return False
    types = schema.get("type")
    names = types if isinstance(types, list) else [types]
    if any(_REFUSED[name](schema) for name in names if isinstance(name, str) and name in _REFUSED):
        return True
    return any(is_refused_by_vllm(one) for one in schema.values())


class XGrammar:
    """Judges instances with a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._library: Any = importlib.import_module("xgrammar")
        self._end = vocabulary.eos_token_ids[0]
        self._size = len(vocabulary.tokens)
        self._tokens = self._library.TokenizerInfo(
            list(vocabulary.tokens), vocab_size=self._size, stop_token_ids=list(vocabulary.eos_token_ids)
        )

    def judge(self, schema: Any, outputs: Sequence[Sequence[int]]) -> list[bool] | str:
        """Whether each output is allowed, or why the schema is refused."""
        if is_refused_by_vllm(schema):
            return "vLLM: not supported by xgrammar"
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=self._judge, args=(schema, outputs, theirs))
        child.start()
        theirs.close()
        try:
            return ours.recv() if ours.poll(PATIENCE_S) else f"given up after {PATIENCE_S:g} s"
        except EOFError:
            return "its process ended"
        finally:
            child.kill()
            child.join()

    def _judge(self, schema: Any, outputs: Sequence[Sequence[int]], pipe: Any) -> None:
        try:
            compiler = self._library.GrammarCompiler(self._tokens, max_threads=MAX_THREADS)
            grammar = compiler.compile_json_schema(json.dumps(schema), any_whitespace=True)
        except Exception as error:
            pipe.send(f"xgrammar: {error}")
        else:
            pipe.send([self._allows(grammar, output) for output in outputs])

    def _allows(self, grammar: Any, output: Sequence[int]) -> bool:
        """Whether the mask at each token allows it, and the end after the last one."""
        matcher = self._library.GrammarMatcher(grammar, max_rollback_tokens=0)
        mask = np.full((1, mask_words(self._size)), -1, np.int32)
        for token_id in [*output, self._end]:
            mask[:] = -1
            matcher.fill_next_token_bitmask(mask)
            if not mask[0, token_id // 32] >> (token_id % 32) & 1 or not matcher.accept_token(token_id):
                return False
        return True
