"""Weight readers: one that only checks, one that reads, one that makes values up.

A model is built twice: first with `HeaderReader`, which gives empty tensors and finds out what is missing, mis-shaped
or unused before a byte of weights is read; then with `CheckpointReader`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from torch import Tensor

from quire.layers.weights import ShardSpec, WeightMap
from quire.loader.checkpoint import Checkpoint, raise_problems
from quire.loader.safetensors_file import DTYPES

IGNORED = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "lm_head.weight",
)
"""Endings of names that older checkpoints store and nobody reads: tables, masks, the second copy of a tied head."""
DRAFTING = re.compile(r"\.mtp_|^mtp\.")
"""In names of layers that predict several tokens at once, which quire does not do."""
_PATTERN_LENGTH = 1_000_003
_DUMMY_SCALE = 0.02


class Names:
    """From the names layers ask for to those in this checkpoint, which may lack the base model's prefix."""

    def __init__(self, checkpoint: Checkpoint, weight_map: WeightMap) -> None:
        prefix = weight_map.base_prefix
        with_prefix = not prefix or any(name.startswith(prefix) for name in checkpoint.tensors)
        self.prefix = "" if with_prefix else prefix

    def __call__(self, name: str) -> str:
        """The name in the checkpoint."""
        return name.removeprefix(self.prefix)


class HeaderReader:
    """Gives tensors without values, and remembers what is wrong."""

    def __init__(self, checkpoint: Checkpoint, weight_map: WeightMap, *, draft_layers: Sequence[str] = ()) -> None:
        """`draft_layers` are names of layers behind the model's own, which nobody reads."""
        self.checkpoint = checkpoint
        self.names = Names(checkpoint, weight_map)
        self.draft_layers = tuple(f"{self.names(name)}." for name in draft_layers)
        self.problems: list[str] = []
        self.used: set[str] = set()
        self.num_bytes = 0
        """Bytes that a `CheckpointReader` will read."""

    def has(self, name: str) -> bool:
        """See `WeightReader.has`."""
        return self.names(name) in self.checkpoint.tensors

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec) -> Tensor:
        """See `WeightReader.read`."""
        stored = self.names(name)
        info = self.checkpoint.tensors.get(stored)
        if info is None:
            if stored not in self.used:
                self.problems.append(
                    f"{stored} {list(shape)} is missing; weights or config.json belong to another model"
                )
        elif info.shape != shape:
            self.problems.append(
                f"{info.file.name}: {stored} has shape {list(info.shape)}, but config.json asks for {list(shape)}; "
                "one of the two belongs to another model"
            )
        elif info.dtype not in DTYPES:
            self.problems.append(
                f"{info.file.name}: {stored} has dtype {info.dtype}, but weights must be {', '.join(DTYPES)}; "
                "use the unquantised version of the model"
            )
        else:
            self.num_bytes += info.num_bytes // shard.parts
        self.used.add(stored)
        return torch.empty(shard.local_shape(shape), device="meta")

    def release(self, names: Sequence[str]) -> None:
        """See `WeightReader.release`."""

    def raise_problems(self) -> None:
        """Raises: CheckpointError naming what is missing, mis-shaped, of a wrong dtype, or not used by the model."""
        unused = [info for name, info in self.checkpoint.tensors.items() if name not in self.used]
        unread = [
            f"{info.file.name}: {info.name} {list(info.shape)} is not used by this model; the file belongs to another"
            for info in unused
            if not info.name.endswith(IGNORED) and not self._is_drafting(info.name)
        ]
        raise_problems(self.checkpoint.directory, self.problems + unread)

    def _is_drafting(self, name: str) -> bool:
        return name.startswith(self.draft_layers) or DRAFTING.search(name) is not None


class CheckpointReader:
    """Gives views of the memory-mapped files, only the rank's slices, and lets their pages go once they are copied."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        weight_map: WeightMap,
        *,
        num_bytes: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress` hears (bytes read, `num_bytes`)."""
        self.checkpoint = checkpoint
        self.names = Names(checkpoint, weight_map)
        self.num_bytes = num_bytes
        self.num_bytes_read = 0
        self.progress = progress

    def has(self, name: str) -> bool:
        """See `WeightReader.has`."""
        return self.names(name) in self.checkpoint.tensors

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec) -> Tensor:
        """See `WeightReader.read`."""
        value = self.checkpoint.view(self.names(name))
        if shard.parts > 1:
            part = shard.slice_of(shape[shard.dim])
            value = value.narrow(shard.dim, part.start, part.stop - part.start)
        self.num_bytes_read += value.numel() * value.element_size()
        return value

    def release(self, names: Sequence[str]) -> None:
        """See `WeightReader.release`."""
        self.checkpoint.drop([self.names(name) for name in names])
        if self.progress is not None:
            self.progress(self.num_bytes_read, self.num_bytes)


class DummyReader:
    """Gives small random values that depend on the seed and the name alone; for benchmarks without weights."""

    def __init__(self, *, seed: int, dtype: torch.dtype) -> None:
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self.pattern = (torch.randn(_PATTERN_LENGTH, generator=generator) * _DUMMY_SCALE).to(dtype)

    def has(self, name: str) -> bool:
        """See `WeightReader.has`."""
        return False

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec) -> Tensor:
        """See `WeightReader.read`."""
        count = torch.Size(shape).numel()
        offset = crc32(f"{self.seed}/{name}".encode()) % _PATTERN_LENGTH
        repeats = (offset + count) // _PATTERN_LENGTH + 1
        value = self.pattern.repeat(repeats)[offset : offset + count].view(shape)
        part = shard.slice_of(shape[shard.dim])
        return value.narrow(shard.dim, part.start, part.stop - part.start)

    def release(self, names: Sequence[str]) -> None:
        """See `WeightReader.release`."""
