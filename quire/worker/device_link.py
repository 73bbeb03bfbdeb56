"""`Link`: how the arrays of a step get to a device with memory of its own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Sent(Protocol):
    """A copy that the device makes when it comes to it."""

    def synchronize(self) -> None:
        """Come back when the copy is made: the host may write its source again."""


class Link(Protocol):
    """Copies to a device, which makes them in order with the rest of its work."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Memory of the host, zeroed, which the device can read by itself. Shapes: -> [num_bytes] uint8."""

    def device_memory(self, num_bytes: int) -> Tensor:
        """Memory of the device, zeroed. Shapes: -> [num_bytes] uint8."""

    def send(self, source: Tensor, target: Tensor) -> Sent:
        """Begin to copy from the host's memory to the device's; the source must stay as it is until that is done."""


class StreamLink:
    """Copies on the current stream of a CUDA or ROCm device, from pinned memory."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def host_memory(self, num_bytes: int) -> Tensor:
        """See `Link`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, num_bytes: int) -> Tensor:
        """See `Link`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, source: Tensor, target: Tensor) -> Sent:
        """See `Link`."""
        target.copy_(source, non_blocking=True)
        event = torch.Event(self._device)
        event.record()
        return event


def link_to(device: str) -> Link | None:
    """The link to a device as torch spells it; None where ops read the host's memory."""
    return None if device == "cpu" else StreamLink(device)
