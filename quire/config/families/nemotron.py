"""Nemotron 3 and 4, Minitron: layer norms that store weights less one, squared ReLUs, half of each head rotated."""

from quire.config.family_spec import FamilySpec, NormKind, Norms, plain

SPEC = FamilySpec(
    architecture="NemotronForCausalLM",
    spellings={"rms_norm_eps": "norm_eps"},
    defaults={
        "hidden_act": "relu2",
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.5,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    norms=Norms(kind=NormKind.LAYER, has_bias=True, offset=1.0),
    mlp=plain("mlp_bias"),
)
