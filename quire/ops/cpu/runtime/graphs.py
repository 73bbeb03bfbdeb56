"""Recorded runs of ops, replayed by one call; `csrc/cpu/runtime/graph.cpp`."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.cpu.library import check, isa, load, recording
from quire.ops.cpu.runtime.dtypes import DTYPES, TILES
from quire.ops.cpu.runtime.memory import TILE_ROWS, Arena, from_arena

lib = load()

BFLOAT16 = DTYPES[torch.bfloat16]
NO_TILES = -1
"""In place of the columns of an output that cannot be in tiles: of several weights side by side."""
CALL = ""
"""In place of a name: an op that is no single function of the library."""
Call = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Operand:
    """An op's output or input that may be in tiles; the dtype's place among the arguments follows the pointer's."""

    pointer: int
    columns: Callable[[list[int]], int]
    takes_tiles: Callable[[list[int]], bool] = lambda arguments: True


def _linear_takes(arguments: list[int]) -> bool:
    weight_dtype, rows, _, k = arguments[5:9]
    return bool(lib.qr_reads_tiles(weight_dtype, rows, k))


def _rope_takes(arguments: list[int]) -> bool:
    tokens, head_size = arguments[13], arguments[16]
    return isa() == "amx" and tokens > TILE_ROWS and head_size % TILE_ROWS == 0


def _rope_columns(arguments: list[int]) -> int:
    heads, kv_heads, head_size = arguments[14:17]
    return (heads + 2 * kv_heads) * head_size


LINEAR_INPUT = _Operand(2, lambda arguments: arguments[8], _linear_takes)
INPUTS = {
    "qr_linear": LINEAR_INPUT,
    "qr_gated_linear": LINEAR_INPUT,
    "qr_rope_and_cache": _Operand(1, _rope_columns, _rope_takes),
}
DENSE_OUTPUT = _Operand(0, lambda arguments: arguments[7])
OUTPUTS = {
    "qr_linear": DENSE_OUTPUT,
    "qr_gated_linear": DENSE_OUTPUT,
    "qr_rms_norm": DENSE_OUTPUT,
    "qr_layer_norm": DENSE_OUTPUT,
    "qr_linear_quantized": _Operand(0, lambda arguments: arguments[7] if arguments[5] == 1 else NO_TILES),
    "qr_paged_attention": _Operand(0, lambda arguments: arguments[14] * arguments[16]),
}


class Graph:
    """The ops of one run, with their arguments: runs of native ones, and calls between them."""

    def __init__(self, parts: list[array[int] | Call], outputs: tuple[Tensor, ...]) -> None:
        self._parts = parts
        self._outputs = outputs

    def replay(self) -> tuple[Tensor, ...]:
        """See `operands.Graph`."""
        for part in self._parts:
            if isinstance(part, array):
                check(lib.qr_replay(part.buffer_info()[0], len(part)))
            else:
                part()
        return self._outputs


class Graphs:
    """See `operands.Graphs`. All graphs of one set share their memory, for one runs at a time."""

    only_ops = True
    captures = False

    def __init__(self) -> None:
        self._arena = Arena()

    def record(self, run: Callable[[], tuple[Tensor, ...]]) -> Graph:
        """See `operands.Graphs.record`."""
        notes = _Notes(self._arena)
        with recording(notes.add, notes.add_call), from_arena(self._arena):
            outputs = run()
        return Graph(notes.parts(), tuple(self._arena.untracked(output) for output in outputs))


@dataclass(slots=True)
class _Passed:
    """What one op wrote and the next read, as long as something refers to it."""

    dtypes: tuple[tuple[list[int], int], tuple[list[int], int]]
    """Of the writer and the reader: arguments, and the dtype's place among them."""
    memory: weakref.ref[memoryview]
    begin: int
    end: int

    def use_tiles(self) -> None:
        for arguments, place in self.dtypes:
            arguments[place] = TILES


class _Notes:
    """The ops of a run so far. What only the op that follows ever reads is passed to it in tiles, where both take them.

    Nothing else reads it if its memory was given back and no op noted until then had an address within. Products of
    many rows read tiles, and would copy rows into them first; and tiles are written from one end to the other, but rows
    by lines of 64 bytes far apart, for which products wait.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._ops: list[tuple[str, list[int]]] = []
        self._calls: dict[int, Call] = {}
        """By the place among `_ops`."""
        self._passed: list[_Passed] = []

    def add(self, name: str, arguments: list[int]) -> None:
        """Note one op."""
        self._settle(arguments)
        if self._ops:
            self._pass_on(*self._ops[-1], name, arguments)
        self._ops.append((name, arguments))

    def add_call(self, run: Call, addresses: list[int]) -> None:
        """Note an op that is no single function of the library. It reads and writes rows, never tiles."""
        self._settle(addresses)
        self._calls[len(self._ops)] = run
        self._ops.append((CALL, addresses))

    def parts(self) -> list[array[int] | Call]:
        """All of them: words for `qr_replay`, and calls."""
        self._settle([])
        parts: list[array[int] | Call] = []
        for index, (name, arguments) in enumerate(self._ops):
            if name == CALL:
                parts.append(self._calls[index])
                continue
            if not parts or not isinstance(parts[-1], array):
                parts.append(array("q"))
            words = parts[-1]
            assert isinstance(words, array)
            words.append(lib.qr_op_code(name.encode()))
            words.extend(arguments)
        return parts

    def _pass_on(self, writer: str, written: list[int], reader: str, read: list[int]) -> None:
        """Wait and see, if the one reads what the other wrote and both take tiles."""
        output, x = OUTPUTS.get(writer), INPUTS.get(reader)
        if output is None or x is None or written[output.pointer] != read[x.pointer]:
            return
        dtypes = (written, output.pointer + 1), (read, x.pointer + 1)
        memory = self._arena.holder(read[x.pointer])
        piece = None if memory is None else memory()
        if (
            memory is not None
            and piece is not None
            and all(arguments[place] == BFLOAT16 for arguments, place in dtypes)
            and output.columns(written) == x.columns(read)
            and x.takes_tiles(read)
        ):
            begin = read[x.pointer]
            self._passed.append(_Passed(dtypes, memory, begin, begin + piece.nbytes))

    def _settle(self, arguments: list[int]) -> None:
        """Decide about what is no longer referred to, or is read by one more op."""
        waiting = self._passed
        self._passed = []
        for passed in waiting:
            if passed.memory() is None:
                passed.use_tiles()
            elif not any(passed.begin <= word < passed.end for word in arguments):
                self._passed.append(passed)
