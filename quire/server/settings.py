"""`ServerSettings`: what an operator can say about the HTTP server, and the flags made from it."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import envs
from quire.config.flags.knobs import add_knob_flags, knob, knobs_from_namespace, read_knobs
from quire.errors import ConfigError, MissingDependency, shown
from quire.log import FORMATS
from quire.message_formats.names import CALL_FORMATS, THINKING_FORMATS
from quire.utils.lazy import nearest
from quire.utils.net import tls_context

LOOPBACK_NAMES = ("localhost", "ip6-localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How the server listens, whom it serves, and what it refuses. Sizes are bytes, times are seconds.

    Raises: ConfigError naming the option, the value and what is allowed.
    """

    host: str = knob("127.0.0.1", "Address to listen on; 0.0.0.0 is every IPv4 one.")
    port: int = knob(8000, "Port to listen on; 0 lets the system choose.", least=0, most=65535)
    uds: str | None = knob(None, "Unix socket to listen on instead of an address.", placeholder="PATH")
    root_path: str = knob("/", "Path under which a proxy serves this server.")
    api_server_count: int = knob(1, "Processes that serve HTTP.", least=1, most=64)
    shutdown_timeout: int = knob(30, "Time that running requests get to finish after SIGTERM.", least=0)

    api_key: tuple[str, ...] = knob(
        (),
        "Keys of which every request must carry one; QUIRE_API_KEY when left out. Without any, all are served.",
        is_secret=True,
    )
    served_model_name: tuple[str, ...] = knob(
        (), "Names under which the model is served; the first is shown. The model's own when left out."
    )
    response_role: str = knob("assistant", "Role of what the model writes.")
    tool_call_parser: str = knob(
        "auto",
        "How the model writes tool calls; auto: as its chat template says.",
        choices=("auto", "none", *CALL_FORMATS),
    )
    reasoning_parser: str = knob(
        "auto",
        "How the model writes its thinking; auto: as its chat template says.",
        choices=("auto", "none", *THINKING_FORMATS),
    )
    trust_request_chat_template: bool = knob(False, "Let requests bring a chat template of their own.")
    default_chat_template_kwargs: dict[str, Any] = knob({}, "Variables every chat template sees, as JSON.")
    enable_force_include_usage: bool = knob(False, "End every stream with its usage, asked for or not.")
    return_tokens_as_token_ids: bool = knob(False, "Write the tokens of logprobs as token_id:N, asked for or not.")
    strict_params: bool = knob(False, "Refuse fields that are not known instead of naming them in warnings.")
    share_prefix_cache: bool = knob(False, "Let requests with different keys reuse each other's prefixes.")

    allowed_origins: tuple[str, ...] = knob((), "Origins whose web pages may call this server; none when left out.")
    allowed_methods: tuple[str, ...] = knob(("GET", "POST"), "Methods such pages may use.")
    allowed_headers: tuple[str, ...] = knob(("*",), "Headers such pages may send.")
    allow_credentials: bool = knob(False, "Let such pages send cookies and the like.")
    ssl_certfile: str | None = knob(None, "Certificate (PEM); makes the server speak TLS.", placeholder="FILE")
    ssl_keyfile: str | None = knob(None, "Private key of the certificate (PEM).", placeholder="FILE")
    ssl_ca_certs: str | None = knob(
        None, "Authorities whose client certificates are required (PEM).", placeholder="FILE"
    )

    max_connections: int = knob(
        4096, "Open connections of a process, TLS handshakes included; more are closed at once.", least=1
    )
    max_concurrent_requests: int = knob(1024, "Requests in progress; more are answered with status 429.", least=1)
    max_concurrent_requests_per_key: int = knob(0, "The same for each API key; 0 sets no limit.", least=0)
    max_sequences_per_request: int = knob(1024, "Sequences (prompts times n) of one request.", least=1)
    max_tokens_per_request: int = knob(
        1 << 22, "Tokens of one request: all prompts, and max_tokens of every sequence.", least=1
    )
    max_concurrent_sequences: int = knob(
        8192,
        "Sequences in progress; more are answered with status 429. A key may have its share of them, and of "
        "max_concurrent_requests, though others have filled the limit.",
        least=1,
    )
    max_concurrent_sequences_per_key: int = knob(0, "The same for each API key; 0 sets no limit.", least=0)
    max_requests_per_minute_per_key: int = knob(0, "Requests one API key may start in a minute; 0: any.", least=0)
    max_body_size: int = knob(16 << 20, "Size of a request body; a megabyte holds some 150,000 token ids.", least=1)
    max_body_values: int = knob(
        1 << 18, "Values in a request body; a string or number counts as one, an array or object as four.", least=64
    )
    max_total_body_size: int = knob(
        128 << 20,
        "Size of the bodies of all requests in progress in one front, 64 bytes for each value included; more are "
        "answered with status 503.",
        least=1,
    )
    response_store_size: int = knob(
        64 << 20,
        "Size of the responses of /v1/responses that are kept in memory, for previous_response_id; 0 keeps none. With "
        "several processes (--api-server-count) none are kept.",
        least=0,
    )
    max_stored_responses: int = knob(4096, "Responses that are kept, the newest of them.", least=1)
    max_queued_work: int = knob(
        1024,
        "Requests of one front that may wait to be read and tokenised; where there are several API keys, one may have "
        "half of them. More are answered with status 429.",
        least=2,
    )
    max_header_size: int = knob(
        64 << 10,
        "Size of a request line with all headers.",
        least=256,
        aliases=("h11_max_incomplete_event_size",),
    )
    max_header_count: int = knob(128, "Headers of a request.", least=4, aliases=("h11_max_header_count",))
    header_timeout: int = knob(10, "Time for the TLS handshake and the headers of a request.", least=1)
    body_timeout: int = knob(60, "Time for a request body; a body that keeps --min-body-rate gets it again.", least=1)
    min_body_rate: int = knob(16384, "Bytes a second at which longer bodies must come.", least=1)
    write_timeout: int = knob(120, "Time for which a client may read too little of what waits for it.", least=1)
    min_reply_rate: int = knob(256, "Bytes a second at which clients must read what waits for them.", least=1)
    request_timeout: int = knob(0, "Time in which a request must be answered; 0 sets no limit.", least=0)
    idle_timeout: int = knob(5, "Time for which a connection without requests is kept.", least=1)
    sse_keep_alive_interval: int = knob(15, "A stream that stands still sends a comment this often; 0: never.", least=0)

    disable_fastapi_docs: bool = knob(False, "Serve no /docs, /redoc and /openapi.json.")
    log_format: str | None = knob(
        None, "Lines for people, or one JSON object a line; QUIRE_LOG_FORMAT when left out.", choices=FORMATS
    )
    log_level: str | None = knob(
        None,
        "Lowest level that is logged; QUIRE_LOG_LEVEL when left out.",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
    )
    otlp_traces_endpoint: str | None = knob(
        None,
        "URL of a collector that takes OpenTelemetry traces over HTTP; needs the extra otel.",
        placeholder="URL",
    )
    enable_log_requests: bool = knob(False, "Log each request when it ends; prompts are never logged.")

    def __new__(cls, *values: Any, **given: Any) -> ServerSettings:
        """Refuse what has no name or an unknown one before the generated `__init__` raises its TypeError."""
        if values:
            raise ConfigError(f"ServerSettings takes keywords only; got {shown(values[0])} without a name")
        names = [option.name for option in dataclasses.fields(cls)]
        for key in given:
            if key not in names:
                raise ConfigError(f"unknown option {shown(key)}{nearest(key, names)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        read_knobs(self)
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("option ssl_keyfile is of no use without ssl_certfile; give both")
        if self.ssl_ca_certs and not self.ssl_certfile:
            raise ConfigError("option ssl_ca_certs needs TLS: give ssl_certfile and ssl_keyfile, too")
        for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"option {name}: there is no file {path!r}")
        if self.ssl_certfile is not None:
            tls_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        if self.otlp_traces_endpoint is not None:
            _check_tracing(self.otlp_traces_endpoint)
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError("options allow_credentials and allowed_origins=* contradict each other; name the origins")
        if not re.fullmatch(r"/[\x21-\x7e]*", self.root_path) or set("?#") & set(self.root_path):
            raise ConfigError(
                f"option root_path must start with / and hold printable ASCII without spaces, ? and #, got "
                f"{shown(self.root_path)}; write other characters as %XX"
            )
        for key in self.api_key:
            if not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("option api_key must hold printable ASCII without spaces: a header cannot carry it")

    @property
    def is_open(self) -> bool:
        """Whether other machines can connect."""
        if self.uds is not None or self.host in LOOPBACK_NAMES:
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    @property
    def warnings(self) -> list[str]:
        """What an operator should hear at the start."""
        found = []
        if self.is_open and not self.api_key:
            found.append(
                f"ANYONE WHO CAN REACH {self.host}:{self.port} CAN USE THIS SERVER: it listens on a public address and "
                "has no API key. Set --api-key, or listen on 127.0.0.1."
            )
        if self.api_key and self.is_open and self.ssl_certfile is None:
            found.append("API keys travel unencrypted: set --ssl-certfile, or let a proxy do TLS.")
        return found


def _check_tracing(endpoint: str) -> None:
    """Refuse what could not be traced to, before anything is loaded."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"option otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, got {shown(endpoint)}"
        )
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingDependency(
            'option otlp_traces_endpoint needs the OpenTelemetry SDK and its OTLP exporter: pip install "quire[otel]"'
        )


def with_environment(settings: ServerSettings, environ: Mapping[str, str] = os.environ) -> ServerSettings:
    """The settings with the API keys of QUIRE_API_KEY (separated by commas) where none were given.

    Raises: ConfigError when it is set and holds none: whoever sets it wants the server to ask for keys.
    """
    if settings.api_key or "QUIRE_API_KEY" not in environ:
        return settings
    keys = tuple(key.strip() for key in envs.get("QUIRE_API_KEY", environ).split(",") if key.strip())
    if not keys:
        raise ConfigError("environment variable QUIRE_API_KEY is set and holds no key; set one, or unset it")
    return dataclasses.replace(settings, api_key=keys)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of `ServerSettings`."""
    add_knob_flags(parser, ServerSettings, "server")


def settings_from_namespace(namespace: argparse.Namespace) -> ServerSettings:
    """The settings that parsed flags and the environment describe.

    Raises: ConfigError.
    """
    return with_environment(knobs_from_namespace(namespace, ServerSettings))
