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
from quire.models.interfaces import Model
from quire.ops import functional, table
from quire.ops.functional import AttentionMetadata


def arch_of(directory: Path) -> ModelArch:
    return ModelArch.from_config(json.loads((directory / "config.json").read_text()), source="config.json")


@dataclass
class Row:
    """A sequence: its tokens, how many are computed, and its blocks."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Harness:
    """A model, its caches, and rows that take turns. All layers are in one KV group; windows are masks over it."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        block_size: int = 16,
        num_blocks: int = 200,
        max_model_len: int = 256,
    ) -> None:
        self.arch = arch_of(directory)
        self.model: Model = load_model(directory, self.arch, dtype=dtype, max_model_len=max_model_len)
        self.block_size = block_size
        page = self.arch.kv_layout(block_size, str(dtype).removeprefix("torch."), ops=table.in_use()).page
        self.caches = [
            functional.allocate_kv_cache(
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=page.num_kv_heads,
                head_size=page.head_size,
                dtype=dtype,
            )
            for _ in range(self.arch.num_layers)
        ]
        for cache in self.caches:
            cache.fill_(float("nan"))  # what nobody wrote must not be read
        generator = torch.Generator().manual_seed(1)
        self.free = torch.randperm(num_blocks, generator=generator).tolist()

    def add(self, token_ids: list[int]) -> Row:
        return Row(list(token_ids))

    def step(self, work: list[tuple[Row, int]]) -> list[Tensor]:
        """Compute the next tokens of each row, in one forward. Gives float32 logits [tokens, V] per row."""
        hidden = self.model.forward(*self._inputs(work))
        logits = self.model.compute_logits(hidden)
        return list(logits.split([count for _, count in work]))

    def _inputs(self, work: list[tuple[Row, int]]) -> tuple[Tensor, ForwardContext]:
        tokens, positions, slots, starts = [], [], [], [0]
        for row, count in work:
            end = row.num_computed + count
            while len(row.blocks) * self.block_size < end:
                row.blocks.append(self.free.pop())
            for position in range(row.num_computed, end):
                tokens.append(row.token_ids[position])
                positions.append(position)
                slots.append(row.blocks[position // self.block_size] * self.block_size + position % self.block_size)
            starts.append(len(tokens))
            row.num_computed = end
        lengths = [row.num_computed for row, _ in work]
        tables = torch.zeros(len(work), max(len(row.blocks) for row, _ in work), dtype=torch.int32)
        for index, (row, _) in enumerate(work):
            tables[index, : len(row.blocks)] = torch.tensor(row.blocks, dtype=torch.int32)
        metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
            block_size=self.block_size,
        )
        context = ForwardContext(
            positions=torch.tensor(positions),
            groups=[GroupContext(slot_mapping=torch.tensor(slots), attention=metadata)],
            group_of_layer=dict.fromkeys(range(self.arch.num_layers), 0),
            kv_caches=self.caches,
        )
        return torch.tensor(tokens), context

    def logits(self, token_ids: list[int], *, chunk: int | None = None) -> Tensor:
        """Logits of every position of a new row, computed at once or in chunks. Shapes: -> [T, V]."""
        row, parts = self.add(token_ids), []
        while row.num_computed < len(token_ids):
            count = min(chunk or len(token_ids), len(token_ids) - row.num_computed)
            parts.extend(self.step([(row, count)]))
        self.free.extend(row.blocks)
        return torch.cat(parts)
