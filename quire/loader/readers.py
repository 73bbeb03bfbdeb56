"""Weight readers: one that only checks, one that reads, one that makes values up.

A model is built twice: first with `HeaderReader`, which gives empty tensors and finds out what is missing, mis-shaped
or unused before a byte of weights is read; then with `CheckpointReader`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from zlib import crc32

import torch
from torch import Tensor

from quire.config.gguf.tensor_types import QUANTIZED
from quire.config.quantized.stored import Header
from quire.errors import counted
from quire.layers.weights import ShardSpec, WeightMap
from quire.loader.checkpoint import TensorSource
from quire.loader.headers import raise_problems
from quire.loader.mapped_file import DTYPES, STORED_DTYPES
from quire.loader.unread import NOTHING, why_needless
from quire.log import get_logger

log = get_logger(__name__)

INSIDE = ("language_model.", "text_model.")
"""What the names of a language model begin with inside one for text and images."""
_PATTERN_LENGTH = 1_000_003
_DUMMY_SCALE = 0.02


class Names:
    """From the names layers ask for to those in this checkpoint, which may lack the base model's prefix, hold the
    model inside one for text and images, or have the names that transformers writes.
    """

    def __init__(self, checkpoint: TensorSource, weight_map: WeightMap) -> None:
        base = weight_map.base_prefix
        self.tensors, self.resaved = checkpoint.tensors, weight_map.resaved
        self.prefix, self.instead = "", ""
        """What a name begins with, and what it begins with in the checkpoint."""
        within = [(base, base + inside) for inside in INSIDE] + [("", inside) for inside in INSIDE]
        for prefix, instead in within:
            if any(name.startswith(instead) for name in checkpoint.tensors):
                self.prefix, self.instead = prefix, instead
                return
        if not any(name.startswith(base) for name in checkpoint.tensors):
            self.prefix = base

    def __call__(self, name: str) -> str:
        """The name in the checkpoint."""
        if name.startswith(self.prefix):
            name = self.instead + name.removeprefix(self.prefix)
        resaved = (f".{name}".replace(f".{part}", f".{instead}")[1:] for part, instead in self.resaved)
        return next((other for other in resaved if other in self.tensors), name)


class HeaderReader:
    """Gives tensors without values, and remembers what is wrong."""

    def __init__(
        self, checkpoint: TensorSource, weight_map: WeightMap, *, unread: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`unread` has the names of parts that nobody reads, and what is said of them."""
        self.checkpoint = checkpoint
        self.names = Names(checkpoint, weight_map)
        self.unread = {f"{self.names(name)}.": reason for name, reason in unread.items()}
        self.problems: list[str] = []
        self.used: set[str] = set()
        self.num_bytes = 0
        """Bytes that a `CheckpointReader` will read."""

    def header(self, name: str) -> Header | None:
        """See `WeightReader.header`."""
        return self.checkpoint.header(self.names(name))

    def read_raw(self, name: str) -> Tensor:
        """See `WeightReader.read_raw`."""
        info = self.checkpoint.tensors[self.names(name)]
        if info.dtype not in STORED_DTYPES and info.dtype not in QUANTIZED:
            self.problems.append(f"{info.file.name}: {info.name} has dtype {info.dtype}, which torch cannot read")
        if info.name not in self.used:
            self.num_bytes += info.num_bytes
        self.used.add(info.name)
        return torch.empty(info.shape, device="meta")

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
        unused = {
            info: self._why_unread(name, info.shape)
            for name, info in self.checkpoint.tensors.items()
            if name not in self.used
        }
        unread = [
            f"{info.file.name}: {info.name} {list(info.shape)} is not used by this model; the file belongs to another"
            for info, reason in unused.items()
            if reason is None
        ]
        raise_problems(self.checkpoint.directory, self.problems + unread)
        for reason, count in Counter(reason for reason in unused.values() if reason).items():
            first = next(info.name for info, why in unused.items() if why == reason)
            log.info("not read: %s such as %s: %s", counted(count, "tensor"), first, reason)

    def _why_unread(self, name: str, shape: tuple[int, ...]) -> str | None:
        """What a tensor is that no model needs; None for one that belongs to another model."""
        if 0 in shape:
            return NOTHING
        reasons = (reason for part, reason in self.unread.items() if name.startswith(part))
        return next(reasons, None) or why_needless(name)


class CheckpointReader:
    """Gives views of the memory-mapped files, only the rank's slices, and lets their pages go once they are copied."""

    def __init__(
        self,
        checkpoint: TensorSource,
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
        self._raw: set[str] = set()
        """Raw tensors that were read, some of them once for each expert."""
        self.progress = progress

    def header(self, name: str) -> Header | None:
        """See `WeightReader.header`."""
        return self.checkpoint.header(self.names(name))

    def read_raw(self, name: str) -> Tensor:
        """See `WeightReader.read_raw`."""
        stored = self.names(name)
        value = self.checkpoint.view(stored)
        if stored not in self._raw:
            self.num_bytes_read += value.numel() * value.element_size()
        self._raw.add(stored)
        return value

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
        self.divided: dict[str, Tensor] = {}
        """The tensor whose parts were read last."""

    def header(self, name: str) -> Header | None:
        """See `WeightReader.header`."""
        return None

    def read_raw(self, name: str) -> Tensor:
        """See `WeightReader.read_raw`."""
        raise KeyError(name)

    def read(self, name: str, shape: tuple[int, ...], shard: ShardSpec) -> Tensor:
        """See `WeightReader.read`."""
        value = self.divided.get(name)
        if value is None:
            self.divided.clear()
            value = self._make(name, shape)
        if shard.parts > 1:
            self.divided[name] = value
        part = shard.slice_of(shape[shard.dim])
        return value.narrow(shard.dim, part.start, part.stop - part.start)

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        offset = crc32(f"{self.seed}/{name}".encode()) % _PATTERN_LENGTH
        repeats = (offset + count) // _PATTERN_LENGTH + 1
        return self.pattern.repeat(repeats)[offset : offset + count].view(shape)

    def release(self, names: Sequence[str]) -> None:
        """See `WeightReader.release`."""
