"""Triton's interpreter without what takes most of its time and gives nothing.

It computes what it computes with all of it: only what is the same each time is made once.
"""

from __future__ import annotations

import dataclasses
from types import FunctionType
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def patch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange Triton's language once a launch, not at each call of a function.

    It is exchanged already if its builtins are none.
    """
    prepare = interpreter._patch_lang

    def prepare_once(function: FunctionType) -> object:
        is_ready = not any(tl.core.is_builtin(module.load) for module in (tl, tl.core))
        return interpreter._LangPatchScope() if is_ready else prepare(function)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)


def let_integers_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not compute whether integers overflow: it looks at that only if it debugs."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))


def share_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the type of blocks once for each element and shape, and what a tensor takes from its type once for each."""
    init_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    types: dict[tuple[object, ...], dict[str, Any]] = {}

    def type_once(self: tl.block_type, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        key = (element_ty.name, vars(element_ty).get("address_space"), *sizes)
        if key not in types:
            init_type(self, element_ty, shape)
            types[key] = {**vars(self), "of_tensors": {}}
        vars(self).update(types[key])

    def tensor_once(self: tl.tensor, handle: Any, type: Any) -> None:
        known = vars(type).get("of_tensors")
        if known:
            vars(self).update(known, handle=handle, type=type)
            return
        init_tensor(self, handle, type)
        if known is not None:
            known |= {name: value for name, value in vars(self).items() if name not in ("handle", "type")}

    monkeypatch.setattr(tl.block_type, "__init__", type_once)
    monkeypatch.setattr(tl.tensor, "__init__", tensor_once)


def share_numpy_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look once for numpy's type of each of Triton's."""
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def find_once(of: Any) -> Any:
        element = of.element_ty if isinstance(of, tl.block_type) else of
        if element.name not in known:
            known[element.name] = find(element)
        return known[element.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", find_once)
