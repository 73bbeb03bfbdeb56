"""Generate from schemas with the embedded model, and validate every output that ended by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import validator_for

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.structured.params import StructuredOutputsParams
from tools.structured_outputs.schemas import Case

BATCH = 256


def generate(found: Sequence[Case], *, max_tokens: int, num_each: int) -> Counter[str]:
    """Counts of what became of the schemas and of the outputs."""
    counts: Counter[str] = Counter()
    with LLM(max_num_seqs=64, disable_log_stats=True) as llm:
        accepted: list[tuple[Case, SamplingParams]] = []
        for index, case in enumerate(found):
            params = _params(llm, case, index, max_tokens, counts)
            accepted += [(case, params.clone(seed=index * num_each + j)) for j in range(num_each)] if params else []
        for begin in range(0, len(accepted), BATCH):
            part = accepted[begin : begin + BATCH]
            for (case, _), output in zip(part, _outputs(llm, part), strict=True):
                counts[_judge(case, output)] += 1
            print(begin + len(part), "of", len(accepted), dict(counts), flush=True)
    return counts


def _params(llm: LLM, case: Case, index: int, max_tokens: int, counts: Counter[str]) -> SamplingParams | None:
    try:
        form = StructuredOutputsParams(json=case.schema)
        llm.engine.parts.input_processor.grammars.check(form)
    except RequestError as error:
        counts["schema refused"] += 1
        print(f"refused {case.name}: {error.message}"[:300])
        return None
    counts["schema accepted"] += 1
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=index, structured_outputs=form)


def _outputs(llm: LLM, part: Sequence[tuple[Case, SamplingParams]]) -> list[Any]:
    """One at a time where a request fails, so that the others count."""
    try:
        prompts = ["Give an example."] * len(part)
        return llm.generate(prompts, [params for _, params in part], use_tqdm=False)
    except Exception:
        return [_one(llm, params) for _, params in part]


def _one(llm: LLM, params: SamplingParams) -> Any:
    try:
        return llm.generate("Give an example.", params, use_tqdm=False)[0]
    except Exception as error:
        return error


def _judge(case: Case, output: Any) -> str:
    if isinstance(output, Exception):
        print(f"failed {case.name}: {output}"[:300])
        return "output failed"
    completion = output.outputs[0]
    if completion.finish_reason == "length":
        return "output cut by max_tokens"
    try:
        value = json.loads(completion.text)
        make = validator_for(case.schema) if isinstance(case.schema, dict) else validator_for({})
        make.check_schema(case.schema)
        make(case.schema, format_checker=make.FORMAT_CHECKER).validate(value)
    except SchemaError:
        return "output of a schema that jsonschema refuses"
    except Exception as error:
        if str(error).startswith("'0000-"):
            return "output with the year 0000, which RFC 3339 has and Python has not"
        print(f"INVALID {case.name}: {completion.text[:300]!r}: {str(error)[:300]}")
        return "output INVALID"
    return "output valid"
