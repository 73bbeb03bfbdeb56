"""Writes `MODEL_CARD.md`, `NOTICE` and the summary of the manifest from what the run recorded."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import platform
import re
import sysconfig
from collections import defaultdict
from pathlib import Path
from urllib.parse import unquote

import torch
from model import MODELS, TinyLlama

LICENSES = Path(__file__).parent / "licenses"
TEXT_OF = {
    "BSD-3-Clause": "BSD-3-Clause", "BSD-2-Clause": "BSD-2-Clause", "MIT": "MIT", "MIT-CMU": "MIT-CMU", "ISC": "ISC",
    "curl": "curl", "MIT OR Apache-2.0": "MIT", "Apache-2.0 WITH LLVM-exception": "LLVM-exception",
}  # fmt: skip
KIND_NAMES = {
    "howto": "hand-written questions about quire and Python", "flag": "flags of quire",
    "code": "requests for a small program",
    "name": "commands, routes, parameters, classes, metrics", "concept": "words of LLM serving and Python",
    "python": "what a Python function, module, exception or keyword does", "manual": "what a command does",
    "unknown": 'questions outside the domain (answer begins with "I only know")',
}  # fmt: skip
HELP_KINDS = ("howto", "flag", "name", "concept")


def read_rows(path: Path) -> list[dict[str, object]]:
    """The objects of a JSON-lines file; none when it does not exist."""
    return [json.loads(line) for line in path.open()] if path.exists() else []


def summarise(manifest: list[dict[str, object]]) -> list[dict[str, object]]:
    """One row a package and source: version, licence, files, bytes, and a hash over the files' hashes."""
    groups: dict[tuple[object, ...], list[dict[str, object]]] = defaultdict(list)
    for row in manifest:
        groups[row["package"], row["source"], row["version"], row["license"]].append(row)
    summary = []
    for (package, source, version, spdx), rows in sorted(groups.items()):
        lines = sorted(f"{row['sha256']} {row['path']}\n" for row in rows)
        summary.append(
            {
                "package": package,
                "source": source,
                "version": version,
                "license": spdx,
                "files": len(rows),
                "held_out_files": sum(row["split"] == "held_out" for row in rows),
                "bytes": sum(int(row["bytes"]) for row in rows),
                "sha256_of_hashes": hashlib.sha256("".join(lines).encode()).hexdigest(),
            }
        )
    return summary


def copyright_lines(build: Path, package: str, source: str) -> list[str]:
    """The copyright notices in a package's licence file, or in its Debian copyright file, without mail addresses."""
    if source == "man":
        directory = build / "debs" / package / "usr/share/doc" / package
        if directory.is_symlink():
            package = directory.readlink().name
            directory = build / "debs" / package / "usr/share/doc" / package
        text = (directory / "copyright").read_text(errors="replace")
        stanza = re.search(r"^Files: *\n? *\*\s*$(.*?)^License:", text, re.MULTILINE | re.DOTALL)
        body = re.sub(r"^Copyright:", "", stanza.group(1).strip()) if stanza else ""
        lines = [line.strip(" ,") for line in body.splitlines()]
        lines = [line if "opyright" in line else f"Copyright {line}" for line in lines if len(line) > 3]
        lines = lines or re.findall(r"^[^\n]{0,12}Copyright[^\n]+", text, re.MULTILINE)
    else:
        paths = [sysconfig.get_paths()["purelib"], str(build / "site")]
        dist = next(importlib.metadata.distributions(name=package, path=paths))
        licences = [f for f in dist.files or [] if re.fullmatch(r"(LICEN[CS]E|COPYING)[\w.-]*", f.name, re.IGNORECASE)]
        licences.sort(key=lambda file: len(file.parts))
        text = Path(str(dist.locate_file(licences[0]))).read_text(errors="replace") if licences else ""
        lines = re.findall(r"^[^\n]{0,6}Copyright[^\n]+", text[:6000], re.MULTILINE)
        lines = [line for line in lines if re.search(r"\d{4}|\(c\)", line) and "[yyyy]" not in line]
        lines = lines or [f"Copyright the authors of {package}"]
    cleaned = [re.sub(r"<?[\w.+-]+@[\w.-]+>?|\(?https?://\S+", "", line.replace("\u00a9", "(c)")) for line in lines]
    cleaned = [" ".join(line.split()).strip(" *#.,") for line in cleaned]
    return list(dict.fromkeys(cleaned))[:20]


def notice(summary: list[dict[str, object]], build: Path) -> str:
    """The notices that the licences of the training text ask for."""
    parts = [
        "quire-tiny: notices of the texts that the embedded model was trained on",
        "The weights, the recipe and the questions written for it are under the Apache License 2.0, as quire is. A\n"
        "model of this size may repeat its sources word for word; their notices therefore follow.",
    ]
    by_license: dict[str, list[str]] = defaultdict(list)
    for row in summary:
        name, source = str(row["package"]), str(row["source"])
        if name == "python":
            continue
        what = "manual pages" if source == "man" else "docstrings"
        lines = "\n".join(f"    {line}" for line in copyright_lines(build, name, source))
        version = unquote(str(row["version"]))
        by_license[str(row["license"])].append(f"  {name} {version} ({what})\n{lines}")
    for spdx, entries in sorted(by_license.items()):
        parts.append(f"---- {spdx} ----\n\n" + "\n".join(entries))
        if spdx in TEXT_OF:
            parts.append((LICENSES / f"{TEXT_OF[spdx]}.txt").read_text().strip())
        if spdx.startswith("Apache-2.0"):
            parts.append("The text of the Apache License 2.0 is the file LICENSE of quire.")
    python = (Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt").read_text()
    start = python.index("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2")
    terms = python[start : python.index("BEOPEN.COM LICENSE", start)].strip()
    parts += [
        f"---- PSF-2.0 ----\n\n  Python {platform.python_version()} (standard library and language reference)\n"
        "    Copyright (c) 2001 Python Software Foundation; All Rights Reserved\n\n"
        "Derived from it: token statistics, and answers that quote its docstrings.",
        terms,
    ]
    return "\n\n".join(parts) + "\n"


def sizes_by_license(summary: list[dict[str, object]]) -> str:
    """A table of bytes by licence."""
    totals: dict[str, int] = defaultdict(int)
    for row in summary:
        totals[str(row["license"])] += int(row["bytes"])
    rows = [f"| {spdx} | {size:,} |" for spdx, size in sorted(totals.items(), key=lambda item: -item[1])]
    return "\n".join(["| licence | bytes |", "|---|---|", *rows, f"| all | {sum(totals.values()):,} |"])


def recall_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """A table of the recall of trained answers."""
    head = ["| asked in unseen phrasings | questions | exact, greedy | exact, default sampling |", "|---|---|---|---|"]
    rows = [
        f"| {KIND_NAMES[kind]} | {row['questions']} | {row['greedy']:.1%} | {row['sampled']:.1%} |"
        for kind, row in figures["recall"].items()
    ]
    return "\n".join(head + rows)


def loss_curve(rows: list[dict[str, object]]) -> str:
    """A table of the held-out loss over the run."""
    head = ["| minutes | steps | tokens | python | docstrings |", "|---|---|---|---|---|"]
    lines = [
        f"| {row['seconds'] / 60:.0f} | {row['step']:,} | {row['tokens'] / 1e6:.1f} M | {row['held_out']['py']:.3f} "
        f"| {row['held_out']['doc']:.3f} |"
        for row in rows
    ]
    return "\n".join(head + lines)


def versions() -> str:
    """The tools of the run."""
    names = ("torch", "numpy", "tokenizers", "safetensors", "transformers")
    return ", ".join([f"Python {platform.python_version()}", *(f"{n} {importlib.metadata.version(n)}" for n in names)])


def verdicts(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """The figures against the thresholds that were set before the first run."""
    recall = figures["recall"]
    asked = sum(recall[k]["questions"] for k in HELP_KINDS)
    helped = sum(recall[k]["greedy"] * recall[k]["questions"] for k in HELP_KINDS) / asked
    prose, python = figures["bits_per_byte"]["prose"], figures["bits_per_byte"]["python"]
    ratios = prose["model"] / prose["xz"], python["model"] / python["xz"]
    told = recall["python"]["greedy"], recall["manual"]["greedy"]
    parsed, unknown, looping = figures["next_five_lines_parse"], recall["unknown"]["greedy"], figures["loop_rate"]
    personal = figures["leaks"]["personal"]
    checks = [
        ("bits per byte, prose", f"{prose['model']:.2f}", "<= 1.10", prose["model"] <= 1.10),
        ("bits per byte, Python", f"{python['model']:.2f}", "<= 0.99", python["model"] <= 0.99),
        ("below `xz -6`, prose", f"{1 - ratios[0]:.0%} below {prose['xz']:.2f}", ">= 35 %", ratios[0] <= 0.65),
        ("below `xz -6`, Python", f"{1 - ratios[1]:.0%} below {python['xz']:.2f}", ">= 35 %", ratios[1] <= 0.65),
        ("docstring questions, unseen phrasing", f"{told[0]:.1%}", ">= 60 %", told[0] >= 0.6),
        ("command questions, unseen phrasing", f"{told[1]:.1%}", ">= 60 %", told[1] >= 0.6),
        ("quire help, unseen phrasing", f"{helped:.1%} of {asked}", ">= 90 %", helped >= 0.9),
        ("next five lines of unseen functions parse", f"{parsed:.0%}", ">= 60 %", parsed >= 0.6),
        ('outside the domain: "I only know"', f"{unknown:.1%}", ">= 80 %", unknown >= 0.8),
        ("loops (4 tokens more than 6 times in 128)", f"{looping:.1%}", "<= 2 %", looping <= 0.02),
        ("samples with personal data", str(personal), "0", personal == 0),
    ]
    rows = [f"| {name} | {value} | {limit} | {'yes' if met else '**no**'} |" for name, value, limit, met in checks]
    return "\n".join(["| check | measured | threshold | met |", "|---|---|---|---|", *rows])


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--out", type=Path, default=Path("quire/tiny"))
    args = parser.parse_args()
    summary = summarise(read_rows(args.build / "manifest.jsonl"))
    (args.out / "NOTICE").write_text(notice(summary, args.build))
    lines = ",\n".join(f"  {json.dumps(row)}" for row in summary)
    (Path(__file__).parent / "manifest.json").write_text(f"[\n{lines}\n]\n")

    card = (Path(__file__).parent / "card_template.md").read_text()
    figures = json.loads((args.build / "figures.json").read_text())
    final = {name: torch.load(args.build / f"{name}.pt", weights_only=True) for name in MODELS}
    values = {
        "parameters": f"{sum(p.numel() for p in TinyLlama(MODELS['main']).parameters()):,}",
        "draft_parameters": f"{sum(p.numel() for p in TinyLlama(MODELS['draft']).parameters()):,}",
        "licenses": sizes_by_license(summary),
        "recall": recall_table(figures),
        "verdicts": verdicts(figures),
        "verbatim": str(figures["leaks"]["verbatim_50_tokens"]),
        "curve": loss_curve(read_rows(args.build / "main.log.jsonl")),
        "draft_curve": loss_curve(read_rows(args.build / "draft.log.jsonl")),
        "versions": versions(),
        "steps": f"{final['main']['step']:,}",
        "minutes": str(round(final["main"]["seconds"] / 60)),
        "tokens": f"{final['main']['tokens'] / 1e6:.1f}",
        "draft_steps": f"{final['draft']['step']:,}",
        "draft_minutes": str(round(final["draft"]["seconds"] / 60)),
        "acceptance": f"{figures['draft_acceptance']:.0%}",
        "facts": f"{len(read_rows(args.build / 'chat.train.jsonl')):,}",
    }
    for name, value in values.items():
        card = card.replace("{{" + name + "}}", value)
    (args.out / "MODEL_CARD.md").write_text(card)


if __name__ == "__main__":
    main()
