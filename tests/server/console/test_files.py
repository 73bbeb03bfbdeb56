"""The console's files: served without a key, under a policy, from this server alone."""

from __future__ import annotations

import re
from typing import Any

from quire.server import console
from quire.server.launch import pages_of
from quire.server.settings import ServerSettings
from tests.server.conftest import Running
from tests.server.console.conftest import FILES, KEY, SCRIPTS

COLOURS = {f"/console/vendor/highlight/{file.name}" for file in FILES.glob("vendor/highlight/*.js")}
"""Loaded when there is code in a language, so not part of the start."""


def test_the_page_and_all_it_names_are_served_without_a_key(serve: Any) -> None:
    with serve(api_key=(KEY,)) as guarded:
        page = guarded.client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = {f"/{path}" for path in re.findall(r'(?:src|href)="([^"]+)"', page.text)}
        for script in SCRIPTS:
            imported = re.findall(r'(?:from|import) "\./([^"]+)"', script.read_text(encoding="utf-8"))
            named |= {f"/console/{path}" for path in imported}
        assert named | {"/"} | COLOURS == console.PATHS
        for path in console.PATHS:
            assert guarded.client.get(path).status_code == 200, path
        for path in ("/console/", "/console/nope.js", "/console/__init__.py", "/console/../admin.py", "/v1/stats"):
            assert guarded.client.get(path).status_code == 401, path


def test_every_module_is_asked_for_at_once_and_none_before_the_first_paint() -> None:
    page = (FILES / console.PAGE).read_text(encoding="utf-8")
    preloaded = re.findall(r'rel="modulepreload" href="([^"]+)"', page)
    needed = {path[1:] for path in console.PATHS - COLOURS if path.endswith(".js")}
    assert sorted([*preloaded, "console/start.js"]) == sorted(needed)
    at_once = re.sub(r"<template.*?</template>", "", page, flags=re.DOTALL)
    loaded = re.findall(r'<(?:script|link)[^>]+(?:src|href)="([^"]+)"', at_once)
    assert sorted(loaded) == ["console/icon.svg", "console/start.js", "console/style.css"]


def test_behind_the_path_of_a_proxy_the_same_routes_are_open(serve: Any) -> None:
    with serve(api_key=(KEY,), root_path="/proxy") as guarded:
        for path in ("/health", *console.PATHS):
            assert guarded.client.get(path).status_code == 200, path
        for path in ("/v1/stats", "/v1/models", "/proxy/v1/models"):
            assert guarded.client.get(path).status_code == 401, path
        assert guarded.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        assert guarded.client.post("/v1/messages", json={}).json()["type"] == "error", "Anthropic's form"


def test_the_policy_allows_this_server_alone_and_no_markup(server: Running) -> None:
    for path in console.PATHS:
        headers = server.client.get(path).headers
        rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert set(rules.values()) == {"'none'", "'self'"}
        assert rules["default-src"] == rules["frame-ancestors"] == rules["trusted-types"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"


def test_the_files_name_no_other_server_and_make_no_markup() -> None:
    for file in FILES.iterdir():
        if file.suffix in {".js", ".css", ".html"}:
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"https?://|//[a-z]+\.", text), file.name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|localStorage", text)
    page = (FILES / console.PAGE).read_text(encoding="utf-8")
    assert not re.search(r"\son\w+=|\sstyle=|<script(?![^>]+src=)|<style", page)


def test_the_pages_are_named_for_browsers_alone() -> None:
    url = "http://127.0.0.1:8000"
    assert pages_of(url, ServerSettings()) == f"; console: {url}/, API docs: {url}/docs"
    assert pages_of(url, ServerSettings(disable_fastapi_docs=True)) == f"; console: {url}/"
    assert pages_of("unix:/run/quire", ServerSettings(uds="/run/quire")) == ""


def test_the_docs_are_files_of_this_server_and_hidden_with_the_rest(serve: Any) -> None:
    with serve() as server:
        page = server.client.get("/docs")
        paths = {f"/{path}" for path in re.findall(r'(?:src|href)="([^"]+)"', page.text)}
        assert {"/docs/docs.js", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"} <= paths
        for path in paths:
            assert server.client.get(path).status_code == 200, path
        rules = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
        assert rules.pop("img-src") == "'self' data:"
        assert set(rules.values()) == {"'none'", "'self'"}
    with serve(disable_fastapi_docs=True) as server:
        assert {server.client.get(path).status_code for path in paths - console.PATHS} == {404}


def test_redoc_leads_to_the_docs(server: Running) -> None:
    reply = server.client.get("/redoc")
    assert (reply.status_code, reply.headers["location"]) == (307, "docs")
    assert server.client.get("/redoc", follow_redirects=True).status_code == 200


def test_every_vendored_package_comes_with_its_licence() -> None:
    table = (FILES / "vendor" / "README.md").read_text(encoding="utf-8")
    licences = (FILES / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    packages = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2]) if not name.endswith("/")]
    assert {"markdown-it", "@highlightjs/cdn-assets"} <= set(packages)
    for name in packages:
        assert f"==== {name} ====" in licences, name
    for file in (FILES / "vendor").rglob("*.js"):
        assert file.name in table or file.parent.name in table, file


def test_what_has_not_changed_is_not_sent_again(server: Running) -> None:
    tag = server.client.get("/").headers["etag"]
    again = server.client.get("/", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert server.client.get("/", headers={"if-none-match": '"other"'}).status_code == 200
