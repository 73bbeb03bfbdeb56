"""What an engine computes: equal `Identity` and equal request mean equal tokens, whatever runs beside them.

The one notion of "the same engine". A core that replaces another must have it; receipts record it; `system_fingerprint`
and the keys of cached blocks are derived from it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path

import msgspec

from quire import __version__
from quire.config.engine import Capabilities, QuireConfig
from quire.errors import ConfigError

_SHOWN_DIGITS = 12
"""Of a digest, in messages."""
LARGEST_EXACT = 2**53
"""Below it a float holds every whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What must be equal for tokens to be equal, and suffices where `row_invariant` is true: the code, the model, and
    how it is computed.
    """

    quire: str
    model: str
    """The name it is known by; the only field that does not count."""
    weights: str
    """Digest of the weight files as they were read; see `loader.digest`."""
    tokenizer: str
    """Digest of the tokenizer's files, the package that reads them and the chat template; empty without one."""
    architecture: str
    """Digest of config.json as it was understood, overrides included."""
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    ops: str
    isa: str
    """Instruction set of the kernels; empty for ops that have none of their own."""
    kernels: str
    """Digest of their library, likewise."""
    torch: str
    """Its version: reference ops compute with it, and so do conversions while weights are read."""
    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    skip_tokenizer_init: bool
    transformers: str = ""
    """Its version, where it builds the model; empty for quire's own models."""
    grammars: str = ""
    """The library that says which tokens a grammar allows, and its version."""
    row_invariant: bool = True
    """Whether equal tokens are promised at all: what transformers builds, and a GPU's library, computes by the shape of
    the step."""

    def differences(self, other: Identity) -> list[str]:
        """Each field in which another one differs, as `name: mine, not theirs`."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.name != "model")
        return [f"{name}: {_shown(mine)}, not {_shown(theirs)}" for name, mine, theirs in pairs if mine != theirs]

    @property
    def digest(self) -> bytes:
        """32 bytes that are equal for engines that compute the same."""
        return hashlib.sha256(msgspec.json.encode(replace(self, model=""), order="sorted")).digest()


def identity_of(config: QuireConfig, weights: str, capabilities: Capabilities | None = None) -> Identity:
    """The identity of an engine that has these weights and runs on this machine (default: the one of `config`)."""
    model, device = config.model_config, config.device_config
    machine = device.capabilities if capabilities is None else capabilities
    has_own_ops = device.ops == machine.ops
    arch = _as_floats(msgspec.to_builtins(replace(model.arch, source="")))
    return Identity(
        quire=__version__,
        model=Path(model.model).name if Path(model.model).is_dir() else model.model,
        weights=weights,
        tokenizer=model.tokenizer_digest,
        architecture=hashlib.sha256(msgspec.json.encode(arch, order="sorted")).hexdigest(),
        dtype=model.dtype,
        quantization=config.quant_config.name,
        kv_cache_dtype=config.cache_config.dtype,
        ops=device.ops,
        isa=machine.ops_isa if has_own_ops else "",
        kernels=machine.ops_digest if has_own_ops else "",
        torch=machine.torch,
        block_size=config.cache_config.block_size,
        max_model_len=model.max_model_len,
        eos_token_ids=tuple(model.eos_token_ids),
        skip_tokenizer_init=model.skip_tokenizer_init,
        transformers=model.arch.stored.transformers if model.arch.stored is not None else "",
        grammars=f"llguidance {metadata.version('llguidance')}",
        row_invariant=config.row_invariant,
    )


def _as_floats(value: object) -> object:
    """Plain data with numbers of one kind: an integer where a float belongs is one."""
    if isinstance(value, dict):
        return {name: _as_floats(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_floats(inner) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_EXACT:
        return float(value)
    return value


def check_unchanged(then: Identity, now: Identity) -> None:
    """Refuse to go on with requests that an engine had begun which computed otherwise.

    Raises: ConfigError naming what differs.
    """
    changed = then.differences(now)
    if not changed:
        return
    what = "the weights have" if all(line.startswith("weights:") for line in changed) else "the installation has"
    raise ConfigError(
        f"{what} changed since the engine started ({'; '.join(changed)}). Requests that had begun could go on with "
        "other tokens, so no core takes over; restart the server"
    )


def _shown(value: object) -> object:
    is_digest = isinstance(value, str) and len(value) == 2 * hashlib.sha256().digest_size
    return str(value)[:_SHOWN_DIGITS] if is_digest else value
