"""The C ABI through ctypes: what no scheduler sends is refused."""

from __future__ import annotations

import ctypes

import pytest

from quire.errors import EngineError
from quire.ops.cpu import library

pytestmark = pytest.mark.skipif(not library.available(), reason=library.unavailable_reason() or "")
EINVAL = -1
RECORDED = [
    name for name in library.SIGNATURES if library.available() and library.load().qr_op_code(name.encode()) >= 0
]


def zeros_for(name: str) -> list[object]:
    """Null for every pointer, 0 for every number."""
    kinds = library.SIGNATURES[name][1:]
    return [
        {ctypes.c_float: 0.0, ctypes.c_double: 0.0, ctypes.c_int32: 0, ctypes.c_int64: 0}.get(kind) for kind in kinds
    ]


@pytest.mark.parametrize("name", [name for name, kinds in library.SIGNATURES.items() if ctypes.c_int64 in kinds[1:]])
def test_every_function_survives_null_pointers_and_negative_numbers(name: str) -> None:
    function = getattr(library.load(), name)
    assert function(*zeros_for(name)) <= 0
    negative = [-1 if value == 0 and not isinstance(value, float) else value for value in zeros_for(name)]
    assert function(*negative) < 0 or name == "qr_reads_tiles"


@pytest.mark.parametrize("count", [0, -1, 513, 2**31 - 1])
def test_impossible_numbers_of_threads_are_an_error(count: int) -> None:
    before = library.num_threads()
    with pytest.raises(EngineError, match="out of range"):
        library.set_num_threads(count)
    assert library.num_threads() == before


def test_a_recorded_run_of_wrong_length_is_refused() -> None:
    words = (ctypes.c_int64 * 2)(0, 0)
    assert library.load().qr_replay(words, 1) == EINVAL
    assert library.load().qr_replay(words, -1) == EINVAL
    assert library.load().qr_replay(None, 2) == EINVAL
    assert RECORDED
