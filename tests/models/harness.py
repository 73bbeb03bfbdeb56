"""Run a model without an engine: one cache, blocks handed out by hand, any mix of chunks in a step."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quire.attention.context import ForwardContext, GroupContext
from quire.config.arch import ModelArch
from quire.loader.load import load_model
from quire.messages.kv import SlidingWindowSpec
from quire.models.interfaces import Model
from quire.ops.contracts.operands import AttentionMetadata, StateMetadata
from quire.ops.contracts.ops import Ops
from quire.worker.cache_engine import allocate_parts, caches_of


def arch_of(directory: Path) -> ModelArch:
    return ModelArch.from_config(json.loads((directory / "config.json").read_text()), source="config.json")


@dataclass
class Row:
    """A sequence: its tokens, how many are computed, and its blocks in each KV group."""

    token_ids: list[int]
    tables: list[list[int]]
    num_computed: int = 0
    num_freed: dict[int, int] = field(default_factory=dict)
    """By group: leading blocks that it has given back."""


class Harness:
    """A model, its caches, and rows that take turns. What nobody wrote, or will read, is NaN."""

    def __init__(
        self,
        ops: Ops,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        num_blocks: int = 200,
        max_model_len: int = 256,
        quantization: str | None = None,
        dequantize: bool = False,
        arch: ModelArch | None = None,
    ) -> None:
        self.arch = arch_of(directory) if arch is None else arch
        self.on_device = ops.on_device
        self.model: Model = load_model(
            directory,
            self.arch,
            ops=ops,
            dtype=dtype,
            max_model_len=max_model_len,
            quantization=quantization,
            dequantize=dequantize,
        )
        self.layout = self.arch.kv_layout(block_size, str(dtype).removeprefix("torch."), ops=ops.name)
        self.block_size = self.layout.block_size
        self.parts = [part.fill_(float("nan")) for part in allocate_parts(ops, self.layout, num_blocks)]
        self.caches = caches_of(self.layout, self.parts)
        generator = torch.Generator().manual_seed(1)
        self.free = torch.randperm(num_blocks, generator=generator).tolist()

    def add(self, token_ids: list[int]) -> Row:
        return Row(list(token_ids), [[] for _ in self.layout.groups])

    def step(self, work: list[tuple[Row, int]]) -> list[Tensor]:
        """Compute the next tokens of each row, in one forward. Gives float32 logits [tokens, V] per row."""
        hidden = self.model.forward(*self.inputs(work))
        logits = self.model.compute_logits(hidden)
        assert all(map(torch.equal, self.model.largest_logits(hidden), logits[:, : self.arch.vocab_size].max(dim=-1)))
        for row, _ in work:
            self._free_unread(row)
        return list(logits.split([count for _, count in work]))

    def inputs(self, work: list[tuple[Row, int]]) -> tuple[Tensor, ForwardContext]:
        tokens, positions, starts = [], [], [0]
        for row, count in work:
            end = row.num_computed + count
            for index, blocks in enumerate(row.tables):
                if index in self.layout.state_groups:
                    blocks.append(self.free.pop())
                    continue
                while len(blocks) * self.block_size < end:
                    blocks.append(self.free.pop())
            tokens += row.token_ids[row.num_computed : end]
            positions += range(row.num_computed, end)
            starts.append(len(tokens))
            row.num_computed = end
        context = ForwardContext(
            positions=self.on_device(torch.tensor(positions)),
            groups=[self._group(index, work, starts) for index in range(len(self.layout.groups))],
            group_of_layer=self.layout.group_of_layer,
            kv_caches=self.caches,
        )
        return self.on_device(torch.tensor(tokens)), context

    def _group(self, index: int, work: list[tuple[Row, int]], starts: list[int]) -> GroupContext:
        if index in self.layout.state_groups:
            return self._state_group(index, work, starts)
        slots = [
            row.tables[index][position // self.block_size] * self.block_size + position % self.block_size
            for row, count in work
            for position in range(row.num_computed - count, row.num_computed)
        ]
        tables = torch.zeros(len(work), max(len(row.tables[index]) for row, _ in work), dtype=torch.int32)
        for number, (row, _) in enumerate(work):
            tables[number, : len(row.tables[index])] = torch.tensor(row.tables[index], dtype=torch.int32)
        metadata = AttentionMetadata(
            query_start=self.on_device(torch.tensor(starts, dtype=torch.int32)),
            seq_lens=self.on_device(torch.tensor([row.num_computed for row, _ in work], dtype=torch.int32)),
            block_tables=self.on_device(tables),
            block_size=self.block_size,
        )
        return GroupContext(slot_mapping=self.on_device(torch.tensor(slots)), attention=metadata)

    def _state_group(self, index: int, work: list[tuple[Row, int]], starts: list[int]) -> GroupContext:
        """A table of states ends with the page that is written, and the one before it is read."""
        pages = [[-1, *row.tables[index]][-2:] for row, _ in work]
        state = StateMetadata(
            query_start=self.on_device(torch.tensor(starts, dtype=torch.int32)),
            reads=self.on_device(torch.tensor([read for read, _ in pages], dtype=torch.int32)),
            writes=self.on_device(torch.tensor([write for _, write in pages], dtype=torch.int32)),
        )
        nothing = torch.zeros(0, dtype=torch.int32)
        attention = AttentionMetadata(
            query_start=nothing, seq_lens=nothing, block_tables=nothing, block_size=self.block_size
        )
        return GroupContext(slot_mapping=nothing, attention=attention, state=state)

    def _free_unread(self, row: Row) -> None:
        """Give back what no query will read; the table goes on naming it."""
        for index, group in enumerate(self.layout.groups):
            if isinstance(group.spec, SlidingWindowSpec):
                first, end = row.num_freed.get(index, 0), group.spec.num_unread_blocks(row.num_computed)
                self._give_back(row.tables[index][first:end])
                row.num_freed[index] = end
            elif index in self.layout.state_groups:
                self._give_back(row.tables[index][:-1])
                del row.tables[index][:-1]

    def _give_back(self, blocks: list[int]) -> None:
        for part in self.parts:
            part[:, blocks] = float("nan")
        self.free.extend(blocks)

    def logits(self, token_ids: list[int], *, chunk: int | None = None) -> Tensor:
        """Logits of every position of a new row, computed at once or in chunks. Shapes: -> [T, V]."""
        row, parts = self.add(token_ids), []
        while row.num_computed < len(token_ids):
            count = min(chunk or len(token_ids), len(token_ids) - row.num_computed)
            parts.extend(self.step([(row, count)]))
        for index, blocks in enumerate(row.tables):
            self._give_back(blocks[row.num_freed.get(index, 0) :])
        return torch.cat(parts)
