"""What an AMD GPU offers, as the kernel's files say; imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from quire.config.engine import Capabilities
from quire.platforms.accelerators import UNSEEN, accelerator, why_no_kernels
from quire.platforms.platform import Platform

ROOT = Path("/")
"""Where `sys` is mounted; tests look elsewhere."""
VISIBLE = "HIP_VISIBLE_DEVICES"
INSTALL = "Install a build of torch with ROCm, which brings its own Triton."


def why_not(root: Path = ROOT) -> str | None:
    """See `Platform`."""
    if _first_visible(root) is None:
        return f"{VISIBLE} leaves no GPU" if _nodes(root) else "there is no AMD GPU that computes"
    return why_no_kernels("libtorch_hip.so", INSTALL)


def capabilities(root: Path = ROOT) -> Capabilities:
    """See `Platform`: of the first GPU that is visible."""
    node = _first_visible(root)
    assert node is not None
    card = root / f"sys/class/drm/renderD{node['drm_render_minor']}/device"
    total, used = (int((card / f"mem_info_vram_{kind}").read_text(encoding="ascii")) for kind in ("total", "used"))
    return accelerator("AMD GPU", "rocm", _isa(node["gfx_target_version"]), total=total, available=total - used)


def _first_visible(root: Path) -> dict[str, int] | None:
    """The device that HIP calls 0; None without one."""
    nodes, first = _nodes(root), os.environ.get(VISIBLE, "0").partition(",")[0].strip()
    return nodes[int(first)] if first.isdigit() and int(first) < len(nodes) else None


def _nodes(root: Path) -> list[dict[str, int]]:
    """The compute nodes that are GPUs, in the driver's order."""
    files = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    found = [_properties(path) for path in sorted(files, key=lambda path: int(path.parent.name))]
    return [node for node in found if node.get("simd_count") and "drm_render_minor" in node]


def _properties(path: Path) -> dict[str, int]:
    words = (line.split() for line in path.read_text(encoding="ascii", errors="replace").splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) == 2 and line[1].isdigit()}


def _isa(version: int) -> str:
    """90402 is gfx942: decimal major, minor and stepping, the last in hexadecimal digits."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def is_present(root: Path = ROOT) -> bool:
    """See `Platform`."""
    return bool(_nodes(root))


PLATFORM = Platform(why_not=why_not, capabilities=capabilities, caveat=lambda: UNSEEN, is_present=is_present)
