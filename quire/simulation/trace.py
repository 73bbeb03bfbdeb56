"""Requests of a simulation: when each comes, how long it is, what it shares. Read from a file of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Annotated

import msgspec

from quire.errors import ConfigError, counted, shown
from quire.messages.request import MAX_PRIORITY, EngineCoreRequest
from quire.sampling_params import SamplingParams

MAX_REQUESTS = 10_000_000
"""Of one simulation."""
MAX_LINE_BYTES = 4096
MAX_TOKENS = 1 << 24
MAX_TIME_S = 1e9
_PREFIX_TOKEN = -1
"""Tokens of shared prefixes count down from here, those of requests up from 0."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request of a trace."""

    arrival_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_TIME_S)]
    """Since the start of the trace."""
    prompt_tokens: Count
    output_tokens: Count
    """Of each branch."""
    prefix_id: str | int | None = None
    """Requests with equal ids begin with the same tokens."""
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0
    """How many."""
    n: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Branches, as of `SamplingParams`."""
    tenant: str = ""
    """Tenants share an engine evenly."""
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)] = 0
    """Lower ones are served first, with `--scheduling-policy priority`."""


def read_trace(name: str) -> list[TraceRequest]:
    """The requests in a file of JSON lines, in order of arrival.

    Raises: ConfigError naming the line and what is wrong with it.
    """
    path = Path(name)
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--trace {name}: it is no regular file")
        with path.open("rb") as file:
            requests = list(_requests(name, _lines(name, file)))
    except OSError as error:
        raise ConfigError(f"--trace {name} cannot be read: {error.strerror}") from None
    if not requests:
        raise ConfigError(f"--trace {name} holds no requests; a line is {_EXAMPLE}")
    return sorted(requests, key=lambda request: request.arrival_s)


_EXAMPLE = '{"arrival_s": 0.5, "prompt_tokens": 120, "output_tokens": 30}'


def _lines(name: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        if len(line) > MAX_LINE_BYTES:
            raise ConfigError(f"--trace {name}: line {number} has more than {MAX_LINE_BYTES} bytes")
        if line.strip():
            yield number, line


def _requests(name: str, lines: Iterable[tuple[int, bytes]]) -> Iterator[TraceRequest]:
    decode = msgspec.json.Decoder(TraceRequest).decode
    for count, (number, line) in enumerate(lines):
        if count == MAX_REQUESTS:
            raise ConfigError(f"--trace {name} has more than {MAX_REQUESTS:,} requests; split it")
        try:
            request = decode(line)
            _check_keys(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"--trace {name}: line {number}: {error}. A line is {_EXAMPLE}") from None
        problem = _contradiction(request)
        if problem:
            raise ConfigError(f"--trace {name}: line {number}: {problem}")
        yield request


def _check_keys(line: bytes) -> None:
    """Refuse keys that come twice; the decoder takes the last one. Most lines hold no more quotes than keys can have.

    Raises: DecodeError.
    """
    if 2 * len(msgspec.json.decode(line)) == line.count(b'"'):
        return
    keys = [key for key, _ in json.loads(line, object_pairs_hook=list)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise msgspec.DecodeError(f"{shown(twice)} is given twice")


def _contradiction(request: TraceRequest) -> str:
    if (request.prefix_id is None) != (request.prefix_tokens == 0):
        return "prefix_id and prefix_tokens belong together; give both or none"
    if request.prefix_tokens > request.prompt_tokens:
        return f"prefix_tokens is {request.prefix_tokens}, more than the {request.prompt_tokens} of the prompt"
    return ""


def check_fits(
    requests: Iterable[TraceRequest], *, max_model_len: int, max_num_seqs: int, has_priorities: bool = False
) -> None:
    """Refuse requests that an engine would refuse.

    Raises: ConfigError naming the first one, the numbers and what to do.
    """
    for number, request in enumerate(requests, 1):
        length = request.prompt_tokens + request.output_tokens
        if length > max_model_len:
            raise ConfigError(
                f"request {number} of the trace has {request.prompt_tokens} prompt and {request.output_tokens} output "
                f"tokens, {length} in all, and the context has {max_model_len}; shorten it or raise --max-model-len"
            )
        if request.priority and not has_priorities:
            raise ConfigError(
                f"request {number} of the trace has priority {request.priority}, which has no effect without "
                "--scheduling-policy priority"
            )
        if request.n > max_num_seqs:
            raise ConfigError(
                f"request {number} of the trace has {counted(request.n, 'branch', 'branches')}, more than "
                f"--max-num-seqs {max_num_seqs}"
            )


class Prompts:
    """Makes the requests of a trace what a core takes."""

    def __init__(self) -> None:
        self._prefixes: dict[str | int, int] = {}
        self._params: dict[int, SamplingParams] = {}

    def request(self, number: int, request: TraceRequest) -> EngineCoreRequest:
        """The `number`-th request: its prompt has tokens that no other one has, behind those that it shares."""
        own = request.prompt_tokens - request.prefix_tokens
        shared: list[int] = []
        if request.prefix_id is not None:
            token = self._prefixes.setdefault(request.prefix_id, _PREFIX_TOKEN - len(self._prefixes))
            shared = [token] * request.prefix_tokens
        return EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=shared + [number] * own,
            sampling_params=self._params_of(request.n),
            seed=0,
            max_tokens=request.output_tokens,
            tenant=request.tenant,
            priority=request.priority,
            received_at=request.arrival_s,
            arrived_at=request.arrival_s,
        )

    def _params_of(self, n: int) -> SamplingParams:
        if n not in self._params:
            self._params[n] = SamplingParams(n=n, ignore_eos=True, detokenize=False)
        return self._params[n]
