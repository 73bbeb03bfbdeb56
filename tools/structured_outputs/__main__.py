"""The command: see the package."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.structured_outputs.generate import generate
from tools.structured_outputs.masks import compare
from tools.structured_outputs.schemas import cases


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.structured_outputs")
    parser.add_argument("what", choices=["generate", "masks"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit", type=int, help="of schemas, drawn at random")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--each", type=int, default=1, help="outputs of each schema")
    parser.add_argument("--library", choices=["llguidance", "xgrammar"], default="llguidance", help="of masks")
    args = parser.parse_args()
    found = cases(args.directory, args.limit)
    if args.what == "generate":
        counts = generate(found, max_tokens=args.max_tokens, num_each=args.each)
    else:
        counts = compare(found, args.library)
    for what, count in sorted(counts.items()):
        print(f"{count:8} {what}")


if __name__ == "__main__":
    main()
