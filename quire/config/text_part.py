"""Models for text and images whose language model quire runs by itself: their `text_config`, read as a config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quire.config.families import ARCHITECTURES
from quire.errors import ConfigError, shown

WRAPPERS = frozenset(
    {
        "Apertus1p5ForConditionalGeneration",
        "AriaForConditionalGeneration",
        "AyaVisionForConditionalGeneration",
        "Cohere2VisionForConditionalGeneration",
        "CohereCompassForConditionalGeneration",
        "DeepseekVLForConditionalGeneration",
        "DeepseekVLHybridForConditionalGeneration",
        "Dots3NoteForConditionalGeneration",
        "Emu3ForConditionalGeneration",
        "Exaone4_5_ForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "GotOcr2ForConditionalGeneration",
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        "Idefics2ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "JanusForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
        "Lfm2VlForConditionalGeneration",
        "Lfm3VlForConditionalGeneration",
        "LightOnOcrForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaNextVideoForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "MiniCPMV4_6ForConditionalGeneration",
        "MiniMaxM3SparseForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "MllamaForConditionalGeneration",
        "Ovis2ForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "VideoLlama3ForConditionalGeneration",
        "VideoLlavaForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
        "VoxtralForConditionalGeneration",
    }
)
"""Classes whose language model is one of a family here as long as there are no images: causal, with one position for
each token."""
SUFFIX = "ForConditionalGeneration"
"""Of the names of all these classes."""
TEXT_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "glm4v_text": "glm4",
        "glm4v_moe_text": "glm4_moe",
        "qwen2_vl_text": "qwen2",
        "qwen2_5_vl_text": "qwen2",
        "qwen3_vl_text": "qwen3",
        "qwen3_vl_moe_text": "qwen3_moe",
    }
)
"""model_type of a language model -> the family that it is of."""
BESIDE_IMAGES: Mapping[str, str] = MappingProxyType({"dots3_note": "dots3_note_text"})
"""model_type of a whole model whose published configs have the keys of the language model beside those of images, not
in a `text_config` -> the family."""
LEFT_OUT: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm4v_text": {
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 13_696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32_768,
        },
        "glm4v_moe_text": {
            "vocab_size": 151_424,
            "attention_bias": True,
            "max_position_embeddings": 65_536,
        },
        "gemma3_text": {
            "vocab_size": 262_208,
        },
        "llama": {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    }
)
"""What keys mean that configs of a model_type leave out where they stand inside another one, as transformers has it."""
DIVIDED = frozenset({"glm4v_text"})
"""model_types whose heads divide the hidden states, and rotate as a whole, where config.json does not say otherwise."""
UNTIED = frozenset({"Apertus1p5ForConditionalGeneration", "CohereCompassForConditionalGeneration"})
"""Classes whose head is its own unless the whole model's config says otherwise, whatever that of its text says."""
SHARED = ("tie_word_embeddings", "dtype", "torch_dtype", "eos_token_id", "bos_token_id", "quantization_config")
"""Keys of the whole model that hold for its language model."""
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")
"""Keys of a rotation that tell apart the positions of an image's patches, which are one number for a text's tokens."""


def text_part(raw: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The config of the language model inside a model for text and images; of any other model the config itself.

    Raises: ConfigError for a language model of no family, or one that is computed otherwise inside.
    """
    text, family = raw.get("text_config"), BESIDE_IMAGES.get(str(raw.get("model_type")))
    if not isinstance(text, Mapping):
        return raw if family is None else {**raw, "model_type": family, "architectures": [ARCHITECTURES[family]]}
    listed = raw.get("architectures")
    name = str(listed[0] if isinstance(listed, list) and listed else raw.get("model_type"))
    model_type = str(text.get("model_type"))
    left_out = LEFT_OUT.get(model_type, {})
    model_type = TEXT_TYPES.get(model_type, model_type)
    if name not in WRAPPERS or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(wrapper.removesuffix(SUFFIX) for wrapper in WRAPPERS))
        raise ConfigError(
            f"{source}: {shown(name)} is a model for text and images (it has a text_config), and quire runs only the "
            f"language models of {known} (each {SUFFIX}), where it has their family. Use a text-only checkpoint"
            f"{f' of the family ({ARCHITECTURES[model_type]})' if model_type in ARCHITECTURES else ''}."
        )
    shared = {key: raw[key] for key in SHARED if raw.get(key) is not None}
    if name in UNTIED:
        shared.setdefault("tie_word_embeddings", False)
    found = {
        **left_out,
        **text,
        **shared,
        "text_eos_token_id": text.get("eos_token_id"),
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
    }
    if text.get("model_type") in DIVIDED:
        found = {"head_dim": _divided(found), "partial_rotary_factor": 1.0, **found}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(key), Mapping):
            found[key] = _of_texts(found[key])
    return found


def _divided(config: Mapping[str, Any]) -> int | None:
    """Features of a head. None for numbers that make no sense, which the family's reading refuses."""
    size, count = config.get("hidden_size"), config.get("num_attention_heads")
    return size // count if isinstance(size, int) and isinstance(count, int) and count > 0 else None


def _of_texts(rotation: Mapping[str, Any]) -> dict[str, Any]:
    """A rotation by the position in the text."""
    kept = {key: value for key, value in rotation.items() if key not in IMAGE_POSITIONS}
    for key in ("type", "rope_type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    return kept
