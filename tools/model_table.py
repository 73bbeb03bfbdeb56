"""Write the table of families in docs/models.md: what they are, from their specs, and what is tested, from the tests.

python -m tools.model_table

A column says that a test has a row for the family: the rows are read from the `parametrize` marks of the tests
themselves, so a family is never said to be tested because somebody wrote so.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _pytest.mark.structures import ParameterSet

from quire.config.arch import ModelArch
from quire.config.catalogue import Family, catalogue
from quire.config.families import ARCHITECTURES
from quire.messages.kv import SlidingWindowSpec
from tests.engine import test_parity, test_recurrent
from tests.family_configs import ATTENTION_FREE, FAMILIES, RECURRENT
from tests.models import test_families, test_rounded
from tests.models.cases import CASES

PAGE = Path(__file__).parents[1] / "docs/models.md"
BEGIN, END = "<!-- python -m tools.model_table: begin -->\n", "<!-- end -->\n"
YES, NO = "yes", "-"
NOT_SO = {"prefix cache": RECURRENT, "preempted": ATTENTION_FREE}
"""Families whose rows of the test of all families leave out what the others have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What the tests say of each family."""

    title: str
    families: frozenset[str]
    """Families whose tests have it."""


def rows_of(test: Callable[..., Any], parameter: str) -> list[Any]:
    """The values that a test is run with for a parameter; none where it has no such rows."""
    values: list[Any] = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
            if parameter in names:
                values += [_value(row, names.index(parameter), len(names)) for row in mark.args[1]]
    return values


def _value(row: Any, index: int, count: int) -> Any:
    """One parameter's of a row, which `pytest.param` may have wrapped."""
    values = row.values if isinstance(row, ParameterSet) else row if count > 1 else (row,)
    return values[index]


def columns() -> list[Column]:
    """In the order of the table."""
    greedy = test_parity.test_greedy_tokens_are_those_of_transformers_however_they_are_run
    engine = frozenset(rows_of(greedy, "family"))
    ways = test_parity.WAYS.values()
    rounded = test_rounded.test_rounded_weights_change_little_and_no_row_notices_another
    in_engine = {
        "greedy tokens": True,
        "in a batch": "batched" in test_parity.WAYS,
        "in chunks": any("long_prefill_token_threshold" in options for options in ways),
        "preempted": any("num_gpu_blocks_override" in options for options in ways),
        "prefix cache": "num_cached_tokens" in inspect.getsource(greedy),
    }
    elsewhere = {
        "preempted": test_recurrent.test_branches_are_the_same_alone_in_company_and_preempted,
        "prefix cache": test_recurrent.test_a_prompt_goes_on_from_a_cached_state_with_the_same_bits,
    }
    also = {title: frozenset(rows_of(test, "family")) for title, test in elsewhere.items()}
    found = {
        title: engine.difference(NOT_SO.get(title, ())) | also.get(title, frozenset()) if is_run else frozenset()
        for title, is_run in in_engine.items()
    }
    return [
        *(Column(title=title, families=families) for title, families in found.items()),
        _column("16 bits", test_families.test_half_precision_stays_close_to_transformers),
        *(_column(format, rounded, format in rows_of(rounded, "quantization")) for format in ("int8", "int4")),
        Column(
            title="windows", families=frozenset(family for family, row in _configurations() if _has_window(family, row))
        ),
    ]


def _column(title: str, test: Callable[..., Any], is_run: bool = True) -> Column:
    return Column(title=title, families=frozenset(rows_of(test, "family") if is_run else ()))


def _configurations() -> list[tuple[str, dict[str, Any]]]:
    """(family, what differs) of each configuration whose logits are compared with those of transformers."""
    return [CASES[case] for case in rows_of(test_families.test_logits_equal_transformers, "case")]


def _has_window(family: str, changes: dict[str, Any]) -> bool:
    """Whether a layer's window is shorter than the longest prompt of the tests."""
    from transformers import AutoConfig

    raw = AutoConfig.for_model(family, **{**FAMILIES[family], **changes}).to_dict()
    arch = ModelArch.from_config({**raw, "architectures": [ARCHITECTURES[family]]}, source=family)
    specs = arch.kv_cache_specs(16, "float32", ops="reference")
    longest = max(test_families.PROMPT_LENGTHS)
    return any(isinstance(spec, SlidingWindowSpec) and spec.window < longest for spec in specs)


def table() -> str:
    """The whole region."""
    counts, tested = Counter(family for family, _ in _configurations()), columns()
    families = [family for family in catalogue() if family.package == "quire"]
    titles = ["family", "architecture", "kind", "configurations", *(column.title for column in tested), "refused"]
    lines = [
        f"{len(families)} families, {counts.total()} configurations.\n",
        _line(titles),
        _line(["---"] * len(titles)),
    ]
    for family in sorted(families, key=lambda family: family.name.lower()):
        name = str(family.model_type)
        marks = [YES if name in column.families else NO for column in tested]
        lines.append(_line([*_facts(family), str(counts[name] or NO), *marks, _refused(family)]))
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _facts(family: Family) -> list[str]:
    return [family.name, f"`{family.architecture}`", str(family.kind)]


def _refused(family: Family) -> str:
    return ", ".join(f"`{key}`" for key in family.refused) or NO


def written(page: str) -> str:
    """The page with the region as it should be.

    Raises: ValueError for one without the region.
    """
    head, rest = page.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + table() + END + tail


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
