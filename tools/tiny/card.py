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
TOOL_NAMES = {
    "calculate": "questions for the calculator: the right call, argument and all",
    "get_time": "questions for the clock: the right call, argument and all",
    "answer_from_result": "the sentence that holds the result of a call",
    "no_call_where_none_is_needed": "no call for a question that needs none",
    "plain_answers_beside_tools": "such a question's exact answer while tools are offered",
    "fill": "a sentence's facts as JSON, without a grammar",
}
RUNS = Path(__file__).parent / "runs.json"
"""What is known of the runs that made the shipped files: steps, tokens, seconds, held-out loss."""
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


def further_values(figures: dict[str, dict[str, dict[str, float]]], run: dict[str, object] | None) -> dict[str, str]:
    """What the card says of tools, which a model that was trained once alone does not call."""
    if run is None:
        return {"ability": "", "further": "", "tool_table": "", "left_out": "tool calls"}
    ability, training = (Path(__file__).parent / "card_further.md").read_text().split("----\n")
    values = {"steps": f"{run['step']:,}", "minutes": str(round(run["seconds"] / 60))}
    values |= {"tokens": f"{run['tokens'] / 1e6:.2f}", "curve": loss_curve(run["curve"])}
    for name, value in values.items():
        training = training.replace("{{further_" + name + "}}", value)
    left_out = "tools other than those of the demonstration"
    return {"ability": ability, "further": training, "tool_table": tool_table(figures) + "\n\n", "left_out": left_out}


def tool_table(figures: dict[str, dict[str, dict[str, float]]]) -> str:
    """A table of what becomes of questions where tools are offered."""
    head = ["| with the demonstration's tools, in unseen phrasings | questions | right, greedy |", "|---|---|---|"]
    rows = figures["tools"]
    lines = [
        f"| {text} | {rows[kind]['questions']} | {rows[kind]['greedy']:.1%} |" for kind, text in TOOL_NAMES.items()
    ]
    return "\n".join(head + lines)


def recorded(build: Path) -> dict[str, dict[str, object]]:
    """The runs of the shipped files: those of this build, and of those it lacks what was recorded before."""
    runs = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    for name in (*MODELS, "further"):
        if (build / f"{name}.pt").exists():
            final = torch.load(build / f"{name}.pt", weights_only=True)
            rows = read_rows(build / f"{name}.log.jsonl")
            curve = [{key: row[key] for key in ("step", "tokens", "seconds", "held_out")} for row in rows]
            runs[name] = {key: final[key] for key in ("step", "tokens", "seconds")} | {"curve": curve}
    if "main" in runs and (build / "main.pt").exists():
        runs["main"]["facts"] = len(read_rows(build / "chat.train.jsonl"))
    return runs


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
    told = [  # a build need not have manual pages
        (f"{name} questions, unseen phrasing", f"{share:.1%}", ">= 60 %", share >= 0.6)
        for name, kind in (("docstring", "python"), ("command", "manual"))
        if (share := recall.get(kind, {}).get("greedy")) is not None
    ]
    parsed, unknown, looping = figures["next_five_lines_parse"], recall["unknown"]["greedy"], figures["loop_rate"]
    personal = figures["leaks"]["personal"]
    checks = [
        ("bits per byte, prose", f"{prose['model']:.2f}", "<= 1.10", prose["model"] <= 1.10),
        ("bits per byte, Python", f"{python['model']:.2f}", "<= 0.99", python["model"] <= 0.99),
        ("below `xz -6`, prose", f"{1 - ratios[0]:.0%} below {prose['xz']:.2f}", ">= 35 %", ratios[0] <= 0.65),
        ("below `xz -6`, Python", f"{1 - ratios[1]:.0%} below {python['xz']:.2f}", ">= 35 %", ratios[1] <= 0.65),
        *told,
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
    parser.add_argument("--notice", action="store_true", help="write NOTICE and manifest.json from this build's text")
    args = parser.parse_args()
    manifest = Path(__file__).parent / "manifest.json"
    if args.notice:
        summary = summarise(read_rows(args.build / "manifest.jsonl"))
        (args.out / "NOTICE").write_text(notice(summary, args.build))
        lines = ",\n".join(f"  {json.dumps(row)}" for row in summary)
        manifest.write_text(f"[\n{lines}\n]\n")
    summary = json.loads(manifest.read_text())

    card = (Path(__file__).parent / "card_template.md").read_text()
    figures = json.loads((args.build / "figures.json").read_text())
    final = recorded(args.build)
    RUNS.write_text(json.dumps(final, indent=1) + "\n")
    values = {
        "parameters": f"{sum(p.numel() for p in TinyLlama(MODELS['main']).parameters()):,}",
        "draft_parameters": f"{sum(p.numel() for p in TinyLlama(MODELS['draft']).parameters()):,}",
        "licenses": sizes_by_license(summary),
        "recall": recall_table(figures),
        "verdicts": verdicts(figures),
        "samples": str(figures["samples"]),
        "verbatim": str(figures["leaks"]["verbatim_50_tokens"]),
        "curve": loss_curve(final["main"]["curve"]),
        "draft_curve": loss_curve(final["draft"]["curve"]),
        **further_values(figures, final.get("further")),
        "versions": versions(),
        "steps": f"{final['main']['step']:,}",
        "minutes": str(round(final["main"]["seconds"] / 60)),
        "tokens": f"{final['main']['tokens'] / 1e6:.1f}",
        "draft_steps": f"{final['draft']['step']:,}",
        "draft_minutes": str(round(final["draft"]["seconds"] / 60)),
        "acceptance": f"{figures['draft_acceptance']:.0%}",
        "facts": f"{final['main']['facts']:,}",
    }
    for name, value in values.items():
        card = card.replace("{{" + name + "}}", value)
    (args.out / "MODEL_CARD.md").write_text(card)


if __name__ == "__main__":
    main()
