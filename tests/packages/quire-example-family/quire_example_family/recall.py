"""Recall: Llama, each of whose layers reads the token embeddings again."""

from quire.config.families.llama import SPEC as LLAMA
from quire.config.family_spec import FamilySpec

SPEC = FamilySpec(
    model_class="quire_example_family.recall_model:RecallForCausalLM",
    defaults={**LLAMA.defaults, "recall_scale": 0.5},
)
