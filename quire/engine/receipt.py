"""Receipts: what it takes to give an answer again, token for token, and what differs when it is not the same.

A receipt is the `Identity` of an engine, and requests with what they were given. Knows no HTTP and runs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.config.json_file import parse_json
from quire.engine.identity import Identity
from quire.errors import InvalidParameter, counted, shown
from quire.outputs import RequestOutput
from quire.sampling_params import FIELD_NAMES, RequestOutputKind, SamplingParams

FORMAT = 2
OLDER_FORMATS = {1: "it records samples of the weights, where this quire compares a digest of all of them"}


@dataclass(slots=True, kw_only=True)
class CompletionReceipt:
    """One completion as it was given."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text_sha256: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReceipt:
    """One prompt, how its tokens were chosen, and what was given."""

    prompt_token_ids: list[int]
    sampling_params: dict[str, Any]
    """All fields of `SamplingParams`, the seed that was in force among them."""
    completions: list[CompletionReceipt]

    def params(self) -> SamplingParams:
        """The parameters, checked like anybody's.

        Raises: InvalidParameter.
        """
        given = dict(self.sampling_params)
        if isinstance(given.get("logit_bias"), dict):  # JSON has no integers as keys
            given["logit_bias"] = {_as_id(key): bias for key, bias in given["logit_bias"].items()}
        return SamplingParams.from_optional(**given).clone(output_kind=RequestOutputKind.FINAL_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Receipt:
    """What reproduces the answer to one call."""

    format: int = FORMAT
    identity: Identity
    requests: list[RequestReceipt]

    def __repr__(self) -> str:
        num_tokens = sum(len(completion.token_ids) for request in self.requests for completion in request.completions)
        return (
            f"Receipt(quire={self.identity.quire!r}, model={self.identity.model!r}, "
            f"{counted(len(self.requests), 'request')}, {counted(num_tokens, 'token')})"
        )

    def to_json(self) -> str:
        """As a file holds it."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, data: str | bytes) -> Receipt:
        """A receipt, or a server's reply that carries one.

        Raises: InvalidParameter.
        """
        try:
            raw = parse_json(data)
            if isinstance(raw, dict) and "receipt" in raw:
                raw = raw["receipt"]
            if isinstance(raw, dict):
                _check_format(raw)
            return msgspec.convert(raw, cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidParameter(
                f"this is no receipt: {error}. Give the reply to a request with the header x-quire-receipt: 1.",
                parameter="receipt",
            ) from None


class Transcript:
    """The outputs of one request as they come, kept for its receipt."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._last: RequestOutput | None = None
        self._token_ids: dict[int, list[int]] = {}
        self._texts: dict[int, list[str]] = {}
        self._reasons: dict[int, str | None] = {}

    def add(self, output: RequestOutput) -> None:
        """Take in an output."""
        delta = self._params.output_kind is RequestOutputKind.DELTA
        self._last = output
        for completion in output.outputs:
            index = completion.index
            before = self._token_ids.get(index, []) if delta else []
            self._token_ids[index] = before
            before += completion.token_ids
            texts = self._texts.get(index, []) if delta else []
            self._texts[index] = texts
            texts.append(completion.text)
            self._reasons[index] = completion.finish_reason

    def receipt(self) -> RequestReceipt:
        """What was given so far."""
        assert self._last is not None
        params = {name: getattr(self._params, name) for name in FIELD_NAMES if name != "output_kind"}
        return RequestReceipt(
            prompt_token_ids=self._last.prompt_token_ids,
            sampling_params={**params, "seed": self._last.seed},
            completions=[
                CompletionReceipt(
                    index=index,
                    token_ids=self._token_ids[index],
                    text_sha256=_sha256(["".join(self._texts[index]).encode("utf-8", "surrogatepass")]),
                    finish_reason=self._reasons[index],
                )
                for index in sorted(self._token_ids)
            ],
        )


def receipt_of(identity: Identity, transcripts: Iterable[Transcript]) -> Receipt:
    """The receipt of finished requests."""
    return Receipt(identity=identity, requests=[transcript.receipt() for transcript in transcripts])


def first_difference(given: RequestReceipt, again: RequestReceipt) -> str | None:
    """Where two answers to the same request part; None when they are identical."""
    if len(given.completions) != len(again.completions):
        return f"{counted(len(given.completions), 'completion')}, now {len(again.completions)}"
    for one, other in zip(given.completions, again.completions, strict=True):
        place = f"completion {one.index}"
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        for position, (before, now) in enumerate(pairs):
            if before != now:
                return f"{place}, output token {position}: {before}, now {now}"
        if len(one.token_ids) != len(other.token_ids):
            return f"{place}: {counted(len(one.token_ids), 'output token')}, now {len(other.token_ids)}"
        if one.finish_reason != other.finish_reason:
            return f"{place}: finish reason {one.finish_reason}, now {other.finish_reason}"
        if one.text_sha256 != other.text_sha256:
            return f"{place}: the tokens are the same, their text is not"
    return None


def _sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _check_format(raw: dict[str, Any]) -> None:
    """Raises: InvalidParameter for a receipt of another quire; ValueError for what has a format of no quire."""
    given = raw.get("format", FORMAT)
    if isinstance(given, int) and given in OLDER_FORMATS:
        identity = raw.get("identity")
        version = identity.get("quire") if isinstance(identity, dict) else None
        raise InvalidParameter(
            f"this receipt has format {given}, and this quire reads {FORMAT}: {OLDER_FORMATS[given]}. Replay it with "
            f"the version that wrote it{f', quire {shown(version)}' if version else ''}.",
            parameter="receipt",
        )
    if given != FORMAT:
        raise ValueError(f"its format is {shown(given)}, this quire reads {FORMAT}")


def _as_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() else key
