"""Collects the permissively licensed text that the embedded model learns from.

Writes `corpus.jsonl` (one document a line: path, source, package, version, license, sha256, split, text) and
`manifest.jsonl` (the same without the text) into the build directory. Knows no tokenizer and no model.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import json
import platform
import re
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from docstrings import docstring_document
from sources import (
    ALLOWED_LICENSES,
    DEBIAN_PACKAGES,
    MANUAL_PAGES_SKIP,
    PYTHON_FILES_SKIP,
    PYTHON_PACKAGES,
    REVIEWED_PYTHON_LICENSES,
    STDLIB_SKIP,
)

MAX_LINE = 400
HELD_OUT_PERCENT = 2.0
MAIL = re.compile(r"<?\b[\w.+-]+(?:@| at )[\w-]+\.(?:[\w-]+\.)*[a-z]{2,6}\b>?")
SECRET_URL = re.compile(r"https?://\S*(?:token|key|sig|secret|password)=\S+", re.IGNORECASE)
LICENSE_LINE = re.compile(
    r"copyright|\(c\) *\d{4}|©|all rights reserved|licen[cs]ed? (?:under|to)|spdx-|permission is hereby"
    r"|^\W*(?:written|contributed|modified|created|originally|author)[^\n]{0,20} by\b|__author__",
    re.IGNORECASE,
)
MAN_SECTIONS_DROPPED = re.compile(
    r"^(?:AUTHORS?|COPYRIGHT|HISTORY|LICEN[CS]E|REPORTING BUGS|BUGS|SEE ALSO|ACKNOWLEDGE?MENTS)\b.*?(?=^\S|\Z)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text with where it came from."""

    path: str
    source: str
    package: str
    version: str
    license: str
    text: str

    def manifest_row(self) -> dict[str, str | int]:
        """The document without its text, with hash, size and split."""
        data = self.text.encode()
        return {
            "path": self.path,
            "source": self.source,
            "package": self.package,
            "version": self.version,
            "license": self.license,
            "sha256": hashlib.sha256(data).hexdigest(),
            "bytes": len(data),
            "split": split_of(self.path),
        }


def split_of(path: str) -> str:
    """`held_out` for a fixed share of the files, chosen by the hash of their path."""
    digest = hashlib.sha256(path.encode()).digest()
    return "held_out" if int.from_bytes(digest[:4], "big") % 10_000 < HELD_OUT_PERCENT * 100 else "train"


def clean(text: str) -> str:
    """Text without mail addresses, secret-bearing URLs, licence paragraphs and over-long lines; "" if it is a table."""
    if sum(ord(c) > 127 for c in text) > 0.2 * len(text):
        return ""
    text = text.expandtabs(8).replace("\r\n", "\n").replace("\f", "\n")
    text = SECRET_URL.sub("", MAIL.sub("", text))
    lines = [line.rstrip() for line in text.split("\n") if len(line) <= MAX_LINE]
    lines = [line for line in lines if not LICENSE_LINE.search(line)]
    text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"
    digits = sum(c.isdigit() for c in text)
    return text if len(text) > 200 and digits < 0.25 * len(text) else ""


def stdlib_documents() -> Iterator[Document]:
    """The Python standard library without tests, and the language-reference topics."""
    root = Path(sysconfig.get_paths()["stdlib"])
    common = {"package": "python", "version": platform.python_version(), "license": "PSF-2.0"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if STDLIB_SKIP.search(name):
            continue
        text = strip_header_comment(path.read_text(encoding="utf-8", errors="replace"))
        yield Document(path=f"stdlib/{name}", source="py", text=text, **common)
    namespace: dict[str, dict[str, str]] = {}
    exec((root / "pydoc_data" / "topics.py").read_text(encoding="utf-8"), namespace)  # the running Python's own file
    for topic, text in sorted(namespace["topics"].items()):
        yield Document(path=f"topics/{topic}", source="topic", text=text, **common)


def strip_header_comment(text: str) -> str:
    """Python source without a leading comment block that states a licence."""
    match = re.match(r"(?:#[^\n]*\n|\s*\n)+", text)
    if match and LICENSE_LINE.search(match.group()):
        return text[match.end() :]
    return text


def package_license(meta: importlib.metadata.PackageMetadata) -> str | None:
    """The allowed SPDX name of an installed package's licence; None when it is not on the list."""
    if reviewed := REVIEWED_PYTHON_LICENSES.get(meta["Name"].lower()):
        return reviewed
    fields = [meta.get("License-Expression") or "", meta.get("License") or ""]
    fields += [value.split("::")[-1] for value in meta.get_all("Classifier") or [] if value.startswith("License")]
    for field in fields:
        for pattern, name in ALLOWED_LICENSES:
            if len(field) < 200 and re.fullmatch(pattern, field.strip(), re.IGNORECASE):
                return name
    return None


def package_documents(search_path: list[str]) -> Iterator[Document]:
    """Docstrings with signatures of the packages quire depends on, one document a file."""
    found = {dist.metadata["Name"].lower(): dist for dist in importlib.metadata.distributions(path=search_path)}
    for name in PYTHON_PACKAGES:
        dist = found.get(name)
        spdx = package_license(dist.metadata) if dist else None
        if dist is None or spdx is None:
            print(f"left out {name}: {'not installed' if dist is None else 'licence not on the list'}")
            continue
        for file in sorted(dist.files or [], key=str):
            if file.suffix not in {".py", ".pyi"} or PYTHON_FILES_SKIP.search(str(file)):
                continue
            path = Path(str(dist.locate_file(file)))
            module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
            source = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            text = docstring_document(source, module)
            if len(text) > 300:
                yield Document(
                    path=f"{name}/{file}", source="doc", package=name, version=dist.version, license=spdx, text=text
                )


def render(path: Path) -> str:
    """A manual page as plain text of 100 columns."""
    roff = path.read_bytes()
    if path.suffix == ".gz":
        roff = gzip.decompress(roff)
    if roff.startswith(b".so "):
        return ""
    command = ["groff", "-Tutf8", "-P-cbou", "-mandoc", "-t", "-rLL=100n", "-K", "utf8"]
    out = subprocess.run(command, input=roff, capture_output=True, check=False).stdout.decode(errors="replace")
    out = out.translate({0x2010: "-", 0x2212: "-", 0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0xAD: "-"})
    body = out.split("\n\n", 1)[-1]
    return MAN_SECTIONS_DROPPED.sub("", re.sub(r"\n+[^\n]*\d{4}[^\n]*\(\d\w*\)\s*\Z", "\n", body))


def manual_documents(deb_dir: Path) -> Iterator[Document]:
    """English manual pages, sections 1 to 8, of downloaded Debian packages with an allowed licence."""
    for deb in sorted(deb_dir.glob("*.deb")):
        package, version, *_ = deb.name.split("_")
        root = deb_dir / package
        if not root.exists():
            subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
        spdx = DEBIAN_PACKAGES.get(package)
        if spdx is None:
            print(f"left out manual pages of {package}: not reviewed")
            continue
        pages = [p for p in sorted((root / "usr/share/man").glob("man[1-8]/*")) if p.is_file() and not p.is_symlink()]
        pages = [p for p in pages if not MANUAL_PAGES_SKIP.search(p.name)]
        with ThreadPoolExecutor(2) as pool:
            for page, text in zip(pages, pool.map(render, pages), strict=True):
                name = f"man/{package}/{page.name.removesuffix('.gz')}"
                yield Document(path=name, source="man", package=package, version=version, license=spdx, text=text)


def drop_repeated_paragraphs(documents: Iterable[Document]) -> Iterator[Document]:
    """Prose whose paragraphs of 60 characters or more appear once in the whole corpus; code is left whole."""
    seen: set[bytes] = set()
    for document in documents:
        if document.source == "py":
            yield document
            continue
        kept = []
        for paragraph in document.text.split("\n\n"):
            key = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=12).digest()
            if len(paragraph) < 60 or key not in seen:
                kept.append(paragraph)
            seen.add(key)
        text = "\n\n".join(kept)
        yield Document(**{**{f: getattr(document, f) for f in document.__slots__}, "text": text})


def sketch(text: str, size: int = 64) -> frozenset[int]:
    """The smallest hashes of the text's 8-word shingles: two sketches' overlap estimates the Jaccard similarity."""
    words = text.split()
    grams = {hash(tuple(words[i : i + 8])) for i in range(max(1, len(words) - 7))}
    return frozenset(sorted(grams)[:size])


def drop_near_duplicates(documents: Iterable[Document]) -> Iterator[Document]:
    """Documents that share no more than 80 % of their 8-word shingles with an earlier one."""
    by_hash: dict[int, list[frozenset[int]]] = {}
    for document in documents:
        own = sketch(document.text)
        others = {other for value in list(own)[:8] for other in by_hash.get(value, [])}
        if any(len(own & other) / len(own | other) > 0.8 for other in others):
            continue
        for value in own:
            by_hash.setdefault(value, []).append(own)
        yield document


def main() -> None:
    """Build the corpus and print its size by source and licence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/tiny"), help="build directory")
    parser.add_argument("--debs", type=Path, default=Path("build/tiny/debs"), help="downloaded Debian packages")
    parser.add_argument("--site", action="append", default=[], help="further directory of installed packages")
    args = parser.parse_args()
    search_path = [sysconfig.get_paths()["purelib"], *args.site]

    raw = [*stdlib_documents(), *package_documents(search_path), *manual_documents(args.debs)]
    cleaned = (Document(**{**{f: getattr(d, f) for f in d.__slots__}, "text": clean(d.text)}) for d in raw)
    documents = [d for d in drop_near_duplicates(drop_repeated_paragraphs(cleaned)) if len(d.text) > 200]

    args.out.mkdir(parents=True, exist_ok=True)
    totals: dict[tuple[str, str], int] = {}
    with (args.out / "corpus.jsonl").open("w") as corpus, (args.out / "manifest.jsonl").open("w") as manifest:
        for document in documents:
            row = document.manifest_row()
            print(json.dumps(row), file=manifest)
            print(json.dumps({**row, "text": document.text}), file=corpus)
            key = (document.source, document.license)
            totals[key] = totals.get(key, 0) + len(document.text)
    for (source, spdx), size in sorted(totals.items()):
        print(f"{source:6} {spdx:24} {size / 1e6:7.2f} MB")


if __name__ == "__main__":
    main()
