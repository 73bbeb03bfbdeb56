"""A model of transformers, run one decoder layer at a time in float32.

The model lies in memory in its own dtype; only the layer that runs is widened.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import ConfigError, MissingDependency

CHECKED_TOKENS = 16
MAX_DIFFERENCE = 1e-3
"""Of logits layer by layer from those of the whole model, relative to the largest."""


def require_transformers(purpose: str) -> None:
    """Raises: MissingDependency when transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingDependency(f'{purpose} needs transformers: pip install "quire[transformers]"')


class LayerwiseModel:
    """The parts of a decoder: what is before the layers, the layers, and what comes after them."""

    def __init__(self, directory: Path, prefix: str) -> None:
        """`prefix` is the name of the decoder layers.

        Raises: ConfigError for a model that is not a chain of layers; MissingDependency.
        """
        self.name = str(directory)
        self._model = _load(directory)
        try:
            found = self._model.get_submodule(prefix)
        except AttributeError:
            found = None
        if not isinstance(found, nn.ModuleList):
            raise ConfigError(f"{directory}: transformers has no layers called {prefix}; use --method rtn")
        self.layers: Sequence[nn.Module] = list(found)
        self.dtype: torch.dtype = self._model.dtype
        self._widen_rest()
        self._returns_tuple = False
        self._arguments: Sequence[Mapping[str, Any]] = []
        self._check()

    def start(self, blocks: Sequence[Sequence[int]]) -> list[Tensor]:
        """What the first layer reads for each block of tokens, all equally long. Shapes: -> [1, T, M] each.

        Raises: ConfigError when layers are given more than that which depends on the tokens.
        """
        hidden, arguments = [], []
        for block in blocks:
            with self._recorded() as calls:
                self._run(block)
            hidden.append(calls[0][0])
            arguments.append([kwargs for _, kwargs in calls])
        if not all(_is_same(other, arguments[0]) for other in arguments[1:]):
            raise ConfigError(f"{self.name}: layers read more of the tokens than hidden states; use --method rtn")
        self._arguments = arguments[0]
        return hidden

    def run(self, index: int, hidden: Tensor) -> Tensor:
        """What a layer gives; the layer must be widened. Shapes: [1, T, M] -> [1, T, M]."""
        with torch.no_grad():
            output = self.layers[index](hidden, **self._arguments[index])
        given: Tensor = output[0] if self._returns_tuple else output
        return given

    @contextmanager
    def widened(self, index: int) -> Iterator[nn.Module]:
        """A layer in float32."""
        layer = self.layers[index].to(torch.float32)
        try:
            yield layer
        finally:
            layer.to(self.dtype)

    def perplexity(self, hidden: Sequence[Tensor], blocks: Sequence[Sequence[int]]) -> float:
        """Of the blocks, from what the last layer gave for them."""
        total, count = 0.0, 0
        for states, block in zip(hidden, blocks, strict=True):
            with self._replaced(states):
                logits = self._run(block)
            loss = nn.functional.cross_entropy(logits[0, :-1].float(), torch.tensor(block[1:]), reduction="sum")
            total, count = total + float(loss), count + len(block) - 1
        return math.exp(total / count)

    def _run(self, block: Sequence[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self._model(input_ids=torch.tensor([block]), use_cache=False).logits
        return logits

    def _widen_rest(self) -> None:
        inside = {id(tensor) for layer in self.layers for tensor in [*layer.parameters(), *layer.buffers()]}
        for tensor in [*self._model.parameters(), *self._model.buffers()]:
            if id(tensor) not in inside and tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.float32)

    @contextmanager
    def _forwards(self, forward: Any) -> Iterator[None]:
        """Every layer does `forward(index, hidden, kwargs)` instead of what it does."""
        for index, layer in enumerate(self.layers):

            def replaced(hidden: Tensor, *args: Any, index: int = index, **kwargs: Any) -> Any:
                if args:
                    raise ConfigError(f"{self.name}: transformers gives layers unnamed arguments; use --method rtn")
                output = forward(index, hidden, kwargs)
                return (output,) if self._returns_tuple else output

            layer.forward = replaced
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    @contextmanager
    def _recorded(self) -> Iterator[list[tuple[Tensor, dict[str, Any]]]]:
        calls: list[tuple[Tensor, dict[str, Any]]] = []

        def record(index: int, hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
            calls.append((hidden, kwargs))
            return hidden

        with self._forwards(record):
            yield calls

    @contextmanager
    def _replaced(self, states: Tensor) -> Iterator[None]:
        with self._forwards(lambda index, hidden, kwargs: states):
            yield

    def _check(self) -> None:
        """Compare a short text, layer by layer, with the whole model.

        Raises: ConfigError when layers do more than read what the last one gave.
        """
        block = [index % 7 + 3 for index in range(CHECKED_TOKENS)]
        expected = self._run_whole(block)
        hidden = self.start([block])[0]
        for index in range(len(self.layers)):
            with self.widened(index):
                hidden = self.run(index, hidden)
        with self._replaced(hidden):
            got = self._run(block)
        if float((got - expected).abs().max()) > MAX_DIFFERENCE * float(expected.abs().max()):
            raise ConfigError(f"{self.name}: the layers do not run one after the other; use --method rtn")

    def _run_whole(self, block: Sequence[int]) -> Tensor:
        def widen(layer: nn.Module, args: Any) -> None:
            layer.to(torch.float32)

        def narrow(layer: nn.Module, args: Any, output: Any) -> None:
            self._returns_tuple = isinstance(output, tuple)
            layer.to(self.dtype)

        hooks = [layer.register_forward_pre_hook(widen) for layer in self.layers]
        hooks += [layer.register_forward_hook(narrow) for layer in self.layers]
        try:
            return self._run(block)
        finally:
            for hook in hooks:
                hook.remove()


def _load(directory: Path) -> Any:
    require_transformers("calibration, and measuring perplexity,")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
    except Exception as error:  # whatever foreign code raises means the same here
        detail = " ".join(str(error).split())[:300]
        raise ConfigError(f"{directory} cannot be loaded by transformers ({type(error).__name__}: {detail})") from error
    return model.requires_grad_(False).eval()


def _is_same(a: Any, b: Any) -> bool:
    """Whether two structures hold the same numbers."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return type(a) is type(b)
