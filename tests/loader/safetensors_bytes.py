"""Write safetensors files byte by byte, so that they can be wrong in any way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Header = dict[str, Any]


def read(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118


def write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def split(file: Path) -> tuple[Header, bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(file: Path, header: Header | str | bytes, data: bytes) -> None:
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    encoded = text.encode() if isinstance(text, str) else text
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
