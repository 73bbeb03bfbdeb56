"""NanoChat: norms without weights, one of embeddings and some of heads behind a rotation the other way round."""

from quire.config.family_spec import FamilySpec, HeadNorms, Norms, WeightNames, plain

SPEC = FamilySpec(
    architecture="NanoChatForCausalLM",
    defaults={
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-6,
        "intermediate_size": 8192,
        "max_position_embeddings": 2048,
        "final_logit_softcapping": 15.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    rotates_back=True,
    norms=Norms(has_weight=False, embedding="norm", heads=HeadNorms.ROTATED),
    mlp=plain(),
    names=WeightNames(up="fc1", down="fc2"),
)
