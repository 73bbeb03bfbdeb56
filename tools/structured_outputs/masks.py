"""Walk labelled instances through grammars: no valid one may be forbidden, no invalid one allowed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire import LLM
from quire.errors import RequestError
from quire.structured.backend import GrammarBackend, Matcher, mask_words, open_backend
from quire.structured.checker import GrammarChecker
from quire.structured.grammar import Vocabulary
from quire.structured.params import StructuredOutputsParams
from tools.structured_outputs.schemas import Case
from tools.structured_outputs.xgrammar_library import XGrammar

Judge = Callable[[Any, list[list[int]]], list[bool] | str]
"""Of a schema and outputs: whether each output is allowed, or why the schema is refused."""


def compare(found: Sequence[Case], library: str = "llguidance") -> Counter[str]:
    """Counts of schemas and instances: as quire judges them, or as vLLM does with xgrammar."""
    counts: Counter[str] = Counter()
    with LLM(disable_log_stats=True) as llm:
        grammars, tokenizer = llm.engine.parts.input_processor.grammars, llm.get_tokenizer()
        judge = XGrammar(grammars.vocabulary()).judge if library == "xgrammar" else _judge_of(grammars)
        for case in found:
            outputs = [tokenizer.encode(_written(case, value), add_special_tokens=False) for value, _ in case.instances]
            judged = judge(case.schema, outputs)
            if isinstance(judged, str):
                counts["schema refused"] += 1
                print(f"refused {case.name}: {judged}"[:300])
                continue
            counts["schema accepted"] += 1
            counts.update(_told(case, judged))
    return counts


def _told(case: Case, judged: Sequence[bool]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for (value, is_valid), allowed in zip(case.instances, judged, strict=True):
        what = "valid" if is_valid else "invalid"
        counts[f"{what} instance {'allowed' if allowed else 'forbidden'}"] += 1
        if allowed != is_valid:
            print(f"{what} {'allowed' if allowed else 'forbidden'} {case.name}: {json.dumps(value)[:200]}")
    counts["schema judged rightly"] = int([is_valid for _, is_valid in case.instances] == list(judged))
    return counts


def _judge_of(grammars: GrammarChecker) -> Judge:
    """As quire judges."""
    vocabulary = grammars.vocabulary()
    backend = open_backend("llguidance", vocabulary)

    def judge(schema: Any, outputs: list[list[int]]) -> list[bool] | str:
        try:
            start = backend.compile(grammars.check(StructuredOutputsParams(json=schema)))
        except RequestError as error:
            return error.message
        return [_allows(backend, start.clone(), ids, vocabulary) for ids in outputs]

    return judge


def _written(case: Case, value: Any) -> str:
    """JSON with the properties of objects in the order in which the schema has them, as the grammar wants them."""
    return json.dumps(_ordered(case.schema, value), ensure_ascii=False)


def _ordered(schema: Any, value: Any) -> Any:
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [_ordered(items, item) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties") if isinstance(schema, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    names = [*(name for name in properties if name in value), *(name for name in value if name not in properties)]
    return {name: _ordered(properties.get(name), value[name]) for name in names}


def _allows(backend: GrammarBackend, matcher: Matcher, ids: Sequence[int], vocabulary: Vocabulary) -> bool:
    """Whether the mask at each token allows it, and the end after the last one."""
    masks = np.zeros((1, mask_words(len(vocabulary.tokens))), np.int32)
    for token_id in [*ids, vocabulary.eos_token_ids[0]]:
        backend.fill_masks([(matcher, 0)], masks)
        if matcher.error or not masks[0, token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.advance(token_id)
    return True
