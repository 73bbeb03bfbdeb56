"""The server's flags: a change here is one for everybody, so it is made on purpose."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from quire.server.settings import ServerSettings, add_server_flags, settings_from_namespace

FLAGS = {
    "--allow-credentials",
    "--allowed-headers",
    "--allowed-methods",
    "--allowed-origins",
    "--api-key",
    "--api-server-count",
    "--body-timeout",
    "--default-chat-template-kwargs",
    "--disable-fastapi-docs",
    "--enable-force-include-usage",
    "--enable-log-requests",
    "--h11-max-header-count",
    "--h11-max-incomplete-event-size",
    "--header-timeout",
    "--host",
    "--idle-timeout",
    "--log-format",
    "--log-level",
    "--max-body-size",
    "--max-body-values",
    "--max-concurrent-requests",
    "--max-concurrent-requests-per-key",
    "--max-concurrent-sequences",
    "--max-concurrent-sequences-per-key",
    "--max-connections",
    "--max-header-count",
    "--max-header-size",
    "--max-requests-per-minute-per-key",
    "--max-sequences-per-request",
    "--max-tokens-per-request",
    "--min-body-rate",
    "--min-reply-rate",
    "--otlp-traces-endpoint",
    "--max-stored-responses",
    "--port",
    "--reasoning-parser",
    "--request-timeout",
    "--response-store-size",
    "--tool-call-parser",
    "--response-role",
    "--return-tokens-as-token-ids",
    "--root-path",
    "--served-model-name",
    "--share-prefix-cache",
    "--shutdown-timeout",
    "--sse-keep-alive-interval",
    "--max-queued-work",
    "--max-total-body-size",
    "--ssl-ca-certs",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--strict-params",
    "--trust-request-chat-template",
    "--uds",
    "--write-timeout",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(add_help=False)
    add_server_flags(made)
    return made


def test_server_flags_are_these() -> None:
    flags = set(parser()._option_string_actions)
    assert {flag for flag in flags if not flag.startswith("--no-")} == FLAGS


@pytest.mark.parametrize("option", dataclasses.fields(ServerSettings), ids=lambda option: option.name)
def test_flag_has_help(option: dataclasses.Field[object]) -> None:
    assert option.metadata["help"].endswith(".")


def test_flags_become_settings() -> None:
    line = "--port 9000 --api-key one --api-key two three --served-model-name a b --strict-params --max-body-size 2MiB"
    settings = settings_from_namespace(parser().parse_args(line.split()))
    assert settings == ServerSettings(
        port=9000,
        api_key=("one", "two", "three"),
        served_model_name=("a", "b"),
        strict_params=True,
        max_body_size=2 << 20,
    )
    assert settings_from_namespace(parser().parse_args([])) == ServerSettings()
