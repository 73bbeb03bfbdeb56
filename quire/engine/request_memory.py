"""What requests take in the core, whether they run or wait, against what the memory plan has for them."""

from __future__ import annotations

from collections import Counter

from quire.config.memory.plan import WAITING_TOKEN_BYTES
from quire.errors import EngineOverloaded
from quire.messages.request import EngineCoreRequest
from quire.structured.grammar import Gate, Grammar

REQUEST_BYTES = 6 << 10
"""A request without its lists: the message, its group, its place in the queue, its timeline."""
SEQUENCE_BYTES = 1 << 10
SHARED_TOKEN_BYTES = 8
"""A prompt token in each further sequence: branches that were preempted wait, too."""
STOP_BYTES = 100
"""A stop token: its number, and its places in the request and in what ends a branch."""
BIAS_BYTES = 100
WORD_BYTES = 64
"""A bad word, without its further tokens."""
WORD_TOKEN_BYTES = 200
"""A token of a longer bad word, with the state in which an output that ends with it is."""
ALLOWED_BYTES = 9
"""A bit and a byte for each of eight tokens of the vocabulary, where only some are allowed."""
CHARACTER_BYTES = 4
MARKER_BYTES = 200
"""Of a gate, without its text."""
TOKEN_BYTES = 48
"""Of a gate."""


def bytes_of(request: EngineCoreRequest) -> int:
    """The most bytes of a core that a request takes, running or waiting, beside its outputs and what steps take.

    As `tests/engine/test_request_memory.py` measures.
    """
    params, words = request.sampling_params, request.bad_words_token_ids
    num_tokens, num_more = len(request.prompt_token_ids), params.num_sequences - 1
    texts = [*params.stop_strings, *(params.bad_words or ())]
    return (
        REQUEST_BYTES
        + num_tokens * (WAITING_TOKEN_BYTES + SHARED_TOKEN_BYTES * num_more)
        + params.num_sequences * SEQUENCE_BYTES
        + len(request.ending_token_ids) * STOP_BYTES
        + len(params.logit_bias or ()) * BIAS_BYTES
        + len(words) * WORD_BYTES
        + sum(len(word) for word in words if len(word) > 1) * WORD_TOKEN_BYTES
        + sum(map(len, texts)) * CHARACTER_BYTES
        + len(request.allowed_tokens or b"") * ALLOWED_BYTES
        + (0 if request.grammar is None else _bytes_of_grammar(request.grammar))
    )


def _bytes_of_grammar(grammar: Grammar) -> int:
    gate = grammar.gate or Gate()
    characters = len(grammar.text) + gate.num_characters
    return characters * CHARACTER_BYTES + len(gate.token_ids) * TOKEN_BYTES + len(gate.markers) * MARKER_BYTES


class RequestMemory:
    """The bytes that the requests of one front take, until they end.

    A tenant may have its share, one part of as many as there are tenants and one more; so there is room for another
    tenant's request, and all together never exceed the limit. A request may be larger while there is no other.
    """

    def __init__(self, limit: int) -> None:
        """`limit` in bytes."""
        self._limit = limit
        self._held: dict[str, tuple[str, int]] = {}
        """By request: tenant and bytes."""
        self._tenants: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """What all requests take."""
        return self._tenants.total()

    def check(self, tenant: str, *, num_requests: int, num_tokens: int) -> None:
        """Whether requests that belong together would fit, their lists left out.

        Raises: EngineOverloaded.
        """
        if num_requests > 1 or self.num_bytes:
            self._check(tenant, num_requests * REQUEST_BYTES + num_tokens * WAITING_TOKEN_BYTES)

    def take(self, request: EngineCoreRequest) -> None:
        """Count a request.

        Raises: EngineOverloaded when it does not fit.
        """
        tenant, size = request.tenant, bytes_of(request)
        if self.num_bytes:
            self._check(tenant, size)
        self._held[request.request_id] = tenant, size
        self._tenants[tenant] += size

    def _check(self, tenant: str, more: int) -> None:
        total, own = self.num_bytes, self._tenants.get(tenant, 0)
        num_active = len(self._tenants) + (not own)
        if total + more > self._limit or own + more > self._limit // (num_active + 1):
            raise EngineOverloaded(
                f"requests take {total >> 10} KiB of the engine's memory, this would take {more >> 10} more, and "
                f"{self._limit >> 10} KiB are planned for all (--max-num-seqs raises that), of which a key may have "
                "its share; try again in a second",
                retry_after=1,
            )

    def give_back(self, request_id: str) -> None:
        """The request has ended. Idempotent."""
        tenant, size = self._held.pop(request_id, ("", 0))
        self._tenants[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant]
