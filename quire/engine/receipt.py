"""Receipts: what it takes to give an answer again, token for token, and what differs when it is not the same.

Equal `Identity` and equal request mean equal tokens, whatever ran beside them. Knows no HTTP and runs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from quire import __version__
from quire.config.engine import QuireConfig
from quire.errors import InvalidParameter, shown
from quire.outputs import RequestOutput
from quire.sampling_params import FIELD_NAMES, RequestOutputKind, SamplingParams

FORMAT = 1
MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
NUM_SAMPLES, SAMPLE_BYTES = 16, 4096
"""Of each weight file: reading all of it would take as long as loading the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What must be equal for tokens to be equal: the code, the model, and how it is computed."""

    quire: str
    model: str
    """A repository's name, or the last part of a directory's path."""
    weights: str
    """Hash over the files of model and tokenizer; of weights their headers, sizes and samples."""
    architecture: str
    """Hash over config.json as it was understood, overrides included."""
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    ops: str
    isa: str
    """Instruction set of the kernels; empty for ops that have none of their own."""
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    skip_tokenizer_init: bool

    def differences(self, other: Identity) -> list[str]:
        """Each field in which another one differs, as `name: mine, not theirs`."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name != "model")
        return [f"{name}: {mine}, not {theirs}" for name, mine, theirs in pairs if mine != theirs]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What reproduces the answer to one call."""

    format: int = FORMAT
    identity: Identity
    requests: list[RequestReceipt]

    def to_json(self) -> bytes:
        """As a file holds it."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Receipt:
        """A receipt, or a server's reply that carries one.

        Raises: InvalidParameter.
        """
        try:
            raw = msgspec.json.decode(data)
            if isinstance(raw, dict) and "receipt" in raw:
                raw = raw["receipt"]
            if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
                raise ValueError(f"its format is {shown(raw['format'])}, this quire reads {FORMAT}")
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


def receipt_of(config: QuireConfig, transcripts: Iterable[Transcript]) -> Receipt:
    """The receipt of finished requests."""
    return Receipt(identity=identity_of(config), requests=[transcript.receipt() for transcript in transcripts])


def first_difference(given: RequestReceipt, again: RequestReceipt) -> str | None:
    """Where two answers to the same request part; None when they are identical."""
    if len(given.completions) != len(again.completions):
        return f"{len(given.completions)} completions, now {len(again.completions)}"
    for one, other in zip(given.completions, again.completions, strict=True):
        place = f"completion {one.index}"
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        for position, (before, now) in enumerate(pairs):
            if before != now:
                return f"{place}, output token {position}: {before}, now {now}"
        if len(one.token_ids) != len(other.token_ids):
            return f"{place}: {len(one.token_ids)} output tokens, now {len(other.token_ids)}"
        if one.finish_reason != other.finish_reason:
            return f"{place}: finish reason {one.finish_reason}, now {other.finish_reason}"
        if one.text_sha256 != other.text_sha256:
            return f"{place}: the tokens are the same, their text is not"
    return None


def identity_of(config: QuireConfig) -> Identity:
    """What an engine's answers depend on; reads a few files of the model the first time."""
    model, device = config.model_config, config.device_config
    arch = replace(model.arch, source="")
    arch = msgspec.convert(msgspec.to_builtins(arch), type(arch))  # an integer where a float belongs is one
    return Identity(
        quire=__version__,
        model=Path(model.model).name if Path(model.model).is_dir() else model.model,
        weights=_files_hash(model.path, model.tokenizer_path),
        architecture=_sha256([msgspec.json.encode(arch, order="sorted")])[:32],
        dtype=model.dtype,
        quantization=config.quant_config.method,
        kv_cache_dtype=config.cache_config.dtype,
        ops=device.ops,
        isa=device.capabilities.ops_isa if device.ops == device.capabilities.ops else "",
        block_size=config.cache_config.block_size,
        max_model_len=model.max_model_len,
        eos_token_ids=tuple(model.eos_token_ids),
        skip_tokenizer_init=model.skip_tokenizer_init,
    )


@lru_cache(maxsize=4)
def _files_hash(model: Path, tokenizer: Path) -> str:
    return _sha256(_pieces(model, tokenizer))[:32]


def _pieces(model: Path, tokenizer: Path) -> Iterator[bytes]:
    for directory, names in ((model, MODEL_FILES), (tokenizer, TOKENIZER_FILES)):
        for name in names:
            if (directory / name).is_file():
                yield f"\0{name}\0".encode()
                yield (directory / name).read_bytes()
    for file in sorted(model.glob("*.safetensors")):
        size = file.stat().st_size
        yield f"\0{file.name}\0{size}\0".encode()
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            yield stream.read(min(header_bytes, size))
            start = 8 + header_bytes
            for number in range(NUM_SAMPLES):
                stream.seek(start + max(0, size - start) * number // NUM_SAMPLES)
                yield stream.read(SAMPLE_BYTES)


def _sha256(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _as_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() else key
