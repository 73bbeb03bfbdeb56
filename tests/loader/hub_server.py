"""A server that speaks the protocol of the Hugging Face hub, as far as downloads need it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """What the server holds and what it was asked for."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """repository -> (status, X-Error-Code)."""
    refused_files: dict[str, int] = field(default_factory=dict)
    """File that is listed -> status of the answer to a request for it."""
    cut_after: dict[str, int] = field(default_factory=dict)
    """File -> bytes after which the connection is closed, and the server is down."""
    is_down: bool = False
    damaged: set[str] = field(default_factory=set)
    """Files of which a byte is changed on the way."""
    tokens: list[str] = field(default_factory=list)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """(method, path, Range)."""

    def fetched(self, file: str) -> list[str]:
        """The ranges of a file that were asked for; empty strings where all of it was."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{file}")]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        self.hub.tokens.append(self.headers.get("Authorization", ""))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if is_api else parts[:2])
        rest = parts[4:] if is_api else parts[2:]
        if self.hub.is_down:
            self._send(503, b"{}", {})
        elif repository in self.hub.refusals:
            status, code = self.hub.refusals[repository]
            self._send(status, b"{}", {"X-Error-Code": code})
        elif repository not in self.hub.repositories:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif len(rest) > 1 and rest[1] not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif is_api:
            self._send_listing(repository, self.hub.repositories[repository], rest[0] if rest else "")
        else:
            self._send_file(self.hub.repositories[repository], "/".join(rest[2:]))

    def _send_listing(self, repository: str, files: dict[str, bytes], kind: str) -> None:
        if kind == "tree":
            listed: Any = [
                {"type": "file", "path": name, "size": len(data), "oid": _hash_of("", data)}
                for name, data in files.items()
            ]
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            listed = {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": siblings, "private": False}
        self._send(200, json.dumps(listed).encode(), {"Content-Type": "application/json"})

    def _send_file(self, files: dict[str, bytes], name: str) -> None:
        if name in self.hub.refused_files:
            self._send(self.hub.refused_files[name], b"", {})
            return
        if name not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        data = files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_hash_of(name, data)}"', "Accept-Ranges": "bytes"}
        span = self.headers.get("Range", "")
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, end = int(first or 0), int(last or len(data) - 1) + 1
        if span:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        cut = self.hub.cut_after.pop(name, None) if self.command == "GET" else None
        body = data[start:end]
        if name in self.hub.damaged:
            body = bytes([body[0] ^ 1]) + body[1:]
        self._send(206 if span else 200, body, headers, cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.hub.is_down = True
            self.close_connection = True


def _hash_of(name: str, data: bytes) -> str:
    if name.endswith((".safetensors", ".gguf")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()  # as git has it


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on a free port of 127.0.0.1."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
