"""Walk labelled instances through grammars: no valid one may be forbidden, no invalid one allowed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire import LLM
from quire.errors import RequestError
from quire.structured.backend import GrammarBackend, Matcher, mask_words, open_backend
from quire.structured.grammar import Vocabulary
from quire.structured.params import StructuredOutputsParams
from tools.structured_outputs.schemas import Case


def compare(found: Sequence[Case]) -> Counter[str]:
    """Counts of schemas and instances."""
    counts: Counter[str] = Counter()
    with LLM(disable_log_stats=True) as llm:
        grammars, tokenizer = llm.engine.parts.input_processor.grammars, llm.get_tokenizer()
        backend = open_backend("llguidance", grammars.vocabulary())
        for case in found:
            try:
                start = backend.compile(grammars.check(StructuredOutputsParams(json=case.schema)))
            except RequestError as error:
                counts["schema refused"] += 1
                print(f"refused {case.name}: {error.message}"[:300])
                continue
            counts["schema accepted"] += 1
            for value, is_valid in case.instances:
                ids = tokenizer.encode(_written(case, value), add_special_tokens=False)
                allowed = _allows(backend, start.clone(), ids, grammars.vocabulary())
                what = "valid" if is_valid else "invalid"
                counts[f"{what} instance {'allowed' if allowed else 'forbidden'}"] += 1
                if allowed != is_valid:
                    print(f"{what} {'allowed' if allowed else 'forbidden'} {case.name}: {json.dumps(value)[:200]}")
    return counts


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
