"""The families: for each model_type a module of that name with its `FamilySpec`, imported when it is used.

A package adds its own with `ModelRegistry.register_model`, or with an entry point in the group `quire.families` whose
name is the architecture and whose value is "module:SPEC".
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType, ModuleType
from typing import Any, cast

from quire.config.config_keys import NOTHING
from quire.config.family_spec import FamilySpec
from quire.config.unknown import refusal
from quire.errors import ConfigError

SPEC_GROUP = "quire.families"
CLASS_GROUP = "quire.models"

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "afmoe": "AfmoeForCausalLM",
        "apertus": "ApertusForCausalLM",
        "apertus1p5_text": "Apertus1p5TextForCausalLM",
        "arcee": "ArceeForCausalLM",
        "aria_text": "AriaTextForCausalLM",
        "axk1": "AXK1ForCausalLM",
        "axk2": "AXK2ForCausalLM",
        "bailing_hybrid": "BailingHybridForCausalLM",
        "bamba": "BambaForCausalLM",
        "beam": "BeamForCausalLM",
        "biogpt": "BioGptForCausalLM",
        "bitnet": "BitNetForCausalLM",
        "bloom": "BloomForCausalLM",
        "codegen": "CodeGenForCausalLM",
        "cohere": "CohereForCausalLM",
        "cohere2": "Cohere2ForCausalLM",
        "cohere2_moe": "Cohere2MoeForCausalLM",
        "cohere_compass_text": "CohereCompassForCausalLM",
        "cwm": "CwmForCausalLM",
        "ctrl": "CTRLLMHeadModel",
        "dbrx": "DbrxForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "deepseek_v32": "DeepseekV32ForCausalLM",
        "deepseek_v4": "DeepseekV4ForCausalLM",
        "diffllama": "DiffLlamaForCausalLM",
        "doge": "DogeForCausalLM",
        "dory": "DoryForCausalLM",
        "dots1": "Dots1ForCausalLM",
        "dots3_note_text": "Dots3NoteForCausalLM",
        "emu3_text_model": "Emu3ForCausalLM",
        "ernie4_5": "Ernie4_5ForCausalLM",
        "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
        "exaone": "ExaoneForCausalLM",
        "exaone4": "Exaone4ForCausalLM",
        "exaone_moe": "ExaoneMoeForCausalLM",
        "falcon": "FalconForCausalLM",
        "falcon_h1": "FalconH1ForCausalLM",
        "falcon_mamba": "FalconMambaForCausalLM",
        "flex_olmo": "FlexOlmoForCausalLM",
        "flint": "FlintForCausalLM",
        "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "gemma3n_text": "Gemma3nForCausalLM",
        "gemma4_text": "Gemma4ForCausalLM",
        "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
        "glm": "GlmForCausalLM",
        "glm4": "Glm4ForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
        "glm_moe_dsa": "GlmMoeDsaForCausalLM",
        "gpt2": "GPT2LMHeadModel",
        "gpt_bigcode": "GPTBigCodeForCausalLM",
        "gpt_neo": "GPTNeoForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM",
        "gpt_neox_japanese": "GPTNeoXJapaneseForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "gptj": "GPTJForCausalLM",
        "granite": "GraniteForCausalLM",
        "granite_swa": "GraniteSWAForCausalLM",
        "granitemoe": "GraniteMoeForCausalLM",
        "granitemoe_swa": "GraniteMoeSWAForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "granitemoeshared": "GraniteMoeSharedForCausalLM",
        "helium": "HeliumForCausalLM",
        "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
        "hy_v3": "HYV3ForCausalLM",
        "hy_v4": "HYV4ForCausalLM",
        "hyperclovax": "HyperCLOVAXForCausalLM",
        "internlm3": "InternLM3ForCausalLM",
        "iquestcoder": "IQuestCoderForCausalLM",
        "jais2": "Jais2ForCausalLM",
        "jamba": "JambaForCausalLM",
        "jetmoe": "JetMoeForCausalLM",
        "kimi_linear": "KimiLinearForCausalLM",
        "kolibri1": "Kolibri1ForCausalLM",
        "laguna": "LagunaForCausalLM",
        "lara_mini": "LaraMiniForCausalLM",
        "lfm2": "Lfm2ForCausalLM",
        "lfm2_moe": "Lfm2MoeForCausalLM",
        "lfm3": "Lfm3ForCausalLM",
        "llama": "LlamaForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "longcat_flash": "LongcatFlashForCausalLM",
        "mamba": "MambaForCausalLM",
        "mamba2": "Mamba2ForCausalLM",
        "mellum": "MellumForCausalLM",
        "mimo_v2_flash": "MiMoV2FlashForCausalLM",
        "minicpm3": "MiniCPM3ForCausalLM",
        "minimax": "MiniMaxForCausalLM",
        "minimax_m2": "MiniMaxM2ForCausalLM",
        "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
        "ministral": "MinistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral": "MistralForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "mllama_text_model": "MllamaForCausalLM",
        "modernbert-decoder": "ModernBertDecoderForCausalLM",
        "mpt": "MptForCausalLM",
        "nanochat": "NanoChatForCausalLM",
        "nemotron": "NemotronForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "olmo": "OlmoForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "olmo3": "Olmo3ForCausalLM",
        "olmo_hybrid": "OlmoHybridForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "openai-gpt": "OpenAIGPTLMHeadModel",
        "opt": "OPTForCausalLM",
        "persimmon": "PersimmonForCausalLM",
        "phi": "PhiForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "phimoe": "PhimoeForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen4_exp_text": "Qwen4ExpForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
        "recurrent_gemma": "RecurrentGemmaForCausalLM",
        "sarvam_mla": "SarvamMLAForCausalLM",
        "sarvam_moe": "SarvamMoEForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
        "solar_open": "SolarOpenForCausalLM",
        "stablelm": "StableLmForCausalLM",
        "starcoder2": "Starcoder2ForCausalLM",
        "vaultgemma": "VaultGemmaForCausalLM",
        "xglm": "XGLMForCausalLM",
        "youtu": "YoutuForCausalLM",
        "zamba": "ZambaForCausalLM",
        "zamba2": "Zamba2ForCausalLM",
        "zaya": "ZayaForCausalLM",
    }
)
"""model_type -> architecture."""

ALSO_CALLED: Mapping[str, str] = MappingProxyType(
    {"JetMoEForCausalLM": "JetMoeForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
)
"""Other names that published checkpoints give an architecture -> its name."""

LLAMA_LIKE = FamilySpec(defaults={"partial_rotary_factor": 1.0})
"""What a class of a plug-in is read as that brings no spec, under a model_type that nobody knows."""

_registered: dict[str, FamilySpec | None] = {}


def register(architecture: str, spec: FamilySpec | None) -> None:
    """Make an architecture known; see `ModelRegistry.register_model`."""
    _registered[architecture] = spec


def registered() -> dict[str, FamilySpec | None]:
    """What the running program has made known, by architecture; None for a class without a spec."""
    return dict(_registered)


def is_shipped(architecture: str) -> bool:
    """Whether quire itself has the architecture."""
    return architecture in ARCHITECTURES.values()


def family_of(architecture: str, model_type: str) -> FamilySpec:
    """How a model differs from Llama: as its plug-in says, else its model_type, else its architecture."""
    spec = _registered.get(architecture)
    if spec is not None:
        return spec
    shipped = {name: known for known, name in ARCHITECTURES.items()}
    if architecture not in shipped:
        for entry_point in entry_points(group=SPEC_GROUP, name=architecture):
            return _plugged(architecture, entry_point.value)
    known = model_type if model_type in ARCHITECTURES else shipped.get(architecture)
    return LLAMA_LIKE if known is None else _shipped(known)


def supported() -> list[str]:
    """The architectures known, entry points of installed packages included."""
    plugged = (entry_points(group=group).names for group in (SPEC_GROUP, CLASS_GROUP))
    return sorted({*ARCHITECTURES.values(), *_registered}.union(*plugged))


def is_known(architecture: str) -> bool:
    """Whether quire or an installed package has the architecture. Imports nothing."""
    return is_shipped(architecture) or architecture in supported()


def check_supported(architecture: str, *, source: str, raw: Mapping[str, Any] = NOTHING) -> None:
    """Refuse an unknown architecture without importing anything. `raw` is the config that names it.

    Raises: ConfigError, see `unknown.refusal`.
    """
    if not is_known(architecture):
        relative = ARCHITECTURES.get(str(raw.get("model_type")))
        raise refusal(raw, architecture, key="architecture", source=source, known=supported(), relative=relative)


def check_model_type(model_type: str, *, source: str, raw: Mapping[str, Any]) -> None:
    """The same for a config that names no architecture."""
    if model_type not in ARCHITECTURES:
        raise refusal(raw, model_type, key="model_type", source=source, known=ARCHITECTURES)


def module_of(model_type: str) -> ModuleType:
    """The module of a family that quire has."""
    return import_module(f"{__name__}.{model_type.replace('-', '_')}")


@cache
def _shipped(model_type: str) -> FamilySpec:
    return cast(FamilySpec, module_of(model_type).SPEC)


@cache
def _plugged(architecture: str, path: str) -> FamilySpec:
    module, _, name = path.partition(":")
    spec = getattr(import_module(module), name, None)
    if not isinstance(spec, FamilySpec):
        raise ConfigError(
            f"the entry point {architecture!r} of the group {SPEC_GROUP!r} ({path}) gives no FamilySpec. "
            "Correct the package's metadata, or uninstall it."
        )
    return spec
