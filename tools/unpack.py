"""Unpack a source distribution over an earlier one. What did not change keeps its time, so a build is incremental.

python tools/unpack.py quire-0.1.0.tar.gz FOLDER
"""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

KEPT = "build"
"""What a build leaves in the folder."""


def unpack(archive: Path, folder: Path) -> None:
    """Make `folder` what the archive's only folder holds, apart from `KEPT`."""
    wanted = contents(archive)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != KEPT and name.as_posix() not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def contents(archive: Path) -> dict[str, bytes]:
    """Each file of a source distribution, by its path in there."""
    with tarfile.open(archive) as tar:
        files = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
