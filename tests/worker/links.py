"""Links to made-up devices, whose memory is the host's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


class CopyLink:
    """To a device with memory of its own that does everything at once."""

    def __init__(self) -> None:
        self.num_bytes_sent: list[int] = []
        """Of each copy."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def device_memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def send(self, source: Tensor, target: Tensor) -> Made:
        self.num_bytes_sent.append(source.nbytes)
        target.copy_(source)
        return Made()


class Made:
    """A copy that is made."""

    def synchronize(self) -> None:
        pass


class LateDevice(CopyLink):
    """To a device that does nothing until somebody waits for it: then what it was given up to there, in order."""

    def __init__(self, *, waits: bool = True) -> None:
        """Without `waits` those who wait for it do not: the fault that the host overwrites what is still copied."""
        super().__init__()
        self._waits = waits
        self._work: deque[Callable[[], object]] = deque()
        self._num_done = 0

    def send(self, source: Tensor, target: Tensor) -> Pending:  # type: ignore[override]
        self.num_bytes_sent.append(source.nbytes)
        self.give(lambda: target.copy_(source))
        return Pending(self, self._num_done + len(self._work)) if self._waits else Pending(self, 0)

    def give(self, work: Callable[[], object]) -> None:
        """Have it do something, after all that it was given before."""
        self._work.append(work)

    def work_up_to(self, number: int) -> None:
        """Do so many things, from the first one on."""
        while self._num_done < number:
            self._work.popleft()()
            self._num_done += 1

    def finish(self) -> None:
        self.work_up_to(self._num_done + len(self._work))


@dataclass(frozen=True)
class Pending:
    """A copy that is made when somebody waits."""

    device: LateDevice
    number: int

    def synchronize(self) -> None:
        self.device.work_up_to(self.number)
