"""Falcon Mamba: Mamba, with norms of what each layer derives from its input."""

from dataclasses import replace

from quire.config.families import mamba

SPEC = replace(
    mamba.SPEC,
    architecture="FalconMambaForCausalLM",
    defaults={**mamba.SPEC.defaults, "bos_token_id": 0, "eos_token_id": 0, "mixer_rms_eps": 1e-6},
)
