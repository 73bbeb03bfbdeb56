"""Which server gets which key."""

from __future__ import annotations

import pytest

from quire.cli.client.credentials import authorization

SENT = {"Authorization": "Bearer openais"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openais")
    for name in ("QUIRE_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:8000", "http://localhost:8000/v1", "localhost:1234", "http://[::1]:8000", "127.9.9.9"),
        *("https://api.openai.com", "https://api.openai.com:443/v1", "https://API.openai.com/v1"),
    ],
)
def test_openais_key_goes_to_this_machine_and_to_openai(url: str) -> None:
    assert authorization(url, None) == SENT


@pytest.mark.parametrize(
    "url",
    [
        *("https://example.org/v1", "http://10.0.0.1:8000", "http://api.openai.com", "https://api.openai.com:8443"),
        *("https://api.openai.com.example.org", "https://localhost.example.org", "http://localhost@example.org"),
        *("http://0.0.0.0:8000", "http://127.0.0.1.example.org", "https://example.org/?api.openai.com"),
        *("http://[::1", "http://a:99999", "", "https://"),
    ],
)
def test_it_goes_to_no_other_server(url: str) -> None:
    assert authorization(url, None) == {}


def test_the_base_url_names_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://gpu.example.org:8000/v1")
    assert authorization("http://gpu.example.org:8000", None) == SENT
    assert authorization("https://gpu.example.org:8000", None) == {}
    assert authorization("http://gpu.example.org", None) == {}
    assert authorization("https://api.openai.com", None) == {}


def test_keys_for_quire_go_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert authorization("https://example.org", "given") == {"Authorization": "Bearer given"}
    monkeypatch.setenv("QUIRE_API_KEY", "first, second")
    for url in ("https://example.org", "http://localhost"):
        assert authorization(url, None) == {"Authorization": "Bearer first"}
