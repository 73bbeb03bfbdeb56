"""Which API key goes to which server."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from quire import envs

KEY_HELP = (
    "key to send; QUIRE_API_KEY when left out, or OPENAI_API_KEY where the server is on this machine or that of "
    "OPENAI_BASE_URL"
)
OPENAI = "https://api.openai.com/v1"
PORTS = {"http": 80, "https": 443}


def authorization(url: str, api_key: str | None) -> dict[str, str]:
    """The header with an API key for the server at a URL; empty without one.

    The given key, or the first of QUIRE_API_KEY, goes wherever the user says. OPENAI_API_KEY is often set for other
    programs: it goes to this machine and to the server of OPENAI_BASE_URL, which is OpenAI's own by default.
    """
    own = envs.get("QUIRE_API_KEY").partition(",")[0].strip()
    key = api_key or own or (os.environ.get("OPENAI_API_KEY") if _may_have_openais(url) else None)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _may_have_openais(url: str) -> bool:
    origin = _origin(url)
    if origin is None:
        return False
    return _is_this_machine(origin[1]) or origin == _origin(os.environ.get("OPENAI_BASE_URL") or OPENAI)


def _origin(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port; None where the URL has none. `HttpClient` says what is wrong with it."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname and port else None


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
