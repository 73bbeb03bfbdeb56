"""GGUF files of tiny checkpoints, written with the package `gguf`: its names of tensors, its types, its blocks.

Also what a checkpoint of transformers with the same weights has, so that both can be compared.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from tests.gguf.conversions import (
    FUSED_BY_HEAD,
    HALVED,
    LINEAR_ATTENTION,
    METADATA,
    STATE_SPACES,
    by_kind,
    heads_of,
    joined_latent,
    latent_parts,
    renamed,
    sorted_by_kind,
    state_space,
    tiled,
    tiled_columns,
    xielu,
)

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "arcee": "arcee",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "nemotron": "nemotron",
    "phi": "phi2",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "bloom": "bloom",
    "mpt": "mpt",
    "falcon": "falcon",
    "phimoe": "phimoe",
    "dbrx": "dbrx",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "dots1": "dots1",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "llama4_text": "llama4",
    "granitemoeshared": "granitemoe",
    "olmo3": "olmo2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "minicpm3": "minicpm3",
    "mamba": "mamba",
    "falcon_mamba": "mamba",
    "mamba2": "mamba2",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "bamba": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "jamba": "jamba",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "ministral3": "mistral3",
    "jais2": "jais2",
    "afmoe": "afmoe",
    "apertus": "apertus",
    "exaone_moe": "exaone-moe",
    "bitnet": "bitnet",
}
"""model_type -> llama.cpp's name."""
ALSO = {"exaone": "llama", "baichuan": "llama", "orion": "stablelm", "minicpm": "granite"}
"""Names of llama.cpp for models that are of a family that has another name, too."""
TAKE_TURNS = (
    *("llama", "smollm3", "granite", "granitemoe", "olmo", "arcee", "internlm2", "baichuan", "minicpm", "mistral3"),
    "granitehybrid",
)
"""Where llama.cpp's converter makes the rows of queries and keys that are rotated together neighbours."""
LESS_ONE = ("gemma", "gemma2", "gemma3", "nemotron", *LINEAR_ATTENTION)
"""Where the converter adds the one that these families add to their norms."""
OF_ALL_EXPERTS = r"(?<!shared_mlp\.)(input|output)_linear\.weight|experts\.(gate_up|down)_proj(_bias)?$"
PLAIN = r"norm|gate\.weight|router|shared_expert_gate|bias|conv\.weight|conv1d|A_log|\.D$|wpe|dt_proj"
"""Tensors that are never quantised."""
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "clip_qkv": "attention.clamp_kqv",
    "use_parallel_residual": "use_parallel_residual",
}
"""config.json -> GGUF."""
SCALES: dict[str, tuple[tuple[int, float], ...]] = {
    "Q2_K": ((80, 0.01), (82, 0.01)),
    "Q3_K": ((108, 0.004),),
    "Q4_K": ((0, 0.0006), (2, 0.0045)),
    "Q5_K": ((0, 0.0003), (2, 0.0045)),
    "Q6_K": ((208, 0.0001),),
    "IQ4_NL": ((0, 0.002),),
    "IQ4_XS": ((0, 0.0001),),
}
"""Types that the package cannot quantise to: where a block has its float16 scales, and sizes that give weights some
0.1 in size."""


def blocks_of(weight: np.ndarray, kind: str, generator: np.random.Generator) -> np.ndarray:
    """The blocks of a weight: rounded, or random ones of its shape. Shapes: [..., M] -> [..., bytes of a row] uint8."""
    qtype = gguf.GGMLQuantizationType[kind]
    if kind not in (*SCALES, "MXFP4"):
        return quantize(np.ascontiguousarray(weight), qtype)
    size, num_bytes = gguf.GGML_QUANT_SIZES[qtype]
    blocks = generator.integers(0, 256, (*weight.shape[:-1], weight.shape[-1] // size, num_bytes), dtype=np.uint8)
    for place, scale in SCALES.get(kind, ()):
        sign = generator.choice([-1.0, 1.0], blocks.shape[:-1]) if len(SCALES[kind]) == 1 else 1.0
        blocks[..., place : place + 2] = np.asarray(scale * sign, np.float16)[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(121, 125, blocks.shape[:-1])
    return blocks.reshape(*weight.shape[:-1], -1)


class GgufFile:
    """A checkpoint on its way to GGUF."""

    def __init__(self, source: Path, *, kind: str = "F32", seed: int = 0, arch: str | None = None) -> None:
        self.source, self.kind = source, kind
        self.config: dict[str, Any] = json.loads((source / "config.json").read_text())
        self.arch = arch or ARCHITECTURES[self.config["model_type"]]
        self.generator = np.random.default_rng(seed)
        self.weights = {name: value.float().numpy() for name, value in load_file(source / "model.safetensors").items()}
        self.extra: dict[str, Any] = {}
        """Further keys of the architecture."""
        self.kinds: dict[str, str] = {}
        """Types of some tensors, by what their names contain."""
        self.alignment: int | None = None
        """Bytes; None for GGUF's 32."""
        self.stands_for: dict[str, np.ndarray] = {}
        """By transformers' names: the numbers that the file's weights stand for."""

    def write(self, target: Path, *, split_tensors: int = 0, tokenizer: bool = True) -> Path:
        """The file, or the first of several with so many tensors each."""
        writer = gguf.GGUFWriter(target, self.arch, split_max_tensors=split_tensors)
        if self.alignment is not None:
            writer.add_custom_alignment(self.alignment)
        self._add_metadata(writer)
        if tokenizer:
            add_byte_pairs(writer, self.source)
            if self.config.get("bos_token_id") is not None:
                writer.add_bos_token_id(self.config["bos_token_id"])
        names = gguf.get_tensor_name_map({name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[self.arch], 16)
        for name, value, kind in self._stored():
            name = renamed(name, self.arch)
            stored = "rope_freqs" if name == "rope_freqs" else names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert stored is not None, f"GGUF has no name for {name}"
            stored = f"{stored}.weight" if name.endswith(("sinks", "rope_freqs")) else stored
            writer.add_tensor(stored, value, raw_dtype=None if kind == "F32" else gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return target if target.exists() else sorted(target.parent.glob(f"{target.stem}-00001-of-*.gguf"))[0]

    def write_dequantized(self, directory: Path) -> Path:
        """The checkpoint with the numbers that the file's weights stand for."""
        shutil.copytree(self.source, directory)
        weights = {name: torch.from_numpy(value.copy()) for name, value in self.stands_for.items()}
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return directory

    def _stored(self) -> Iterator[tuple[str, np.ndarray, str]]:
        """(name, what the file has, its type), experts together."""
        waiting: dict[str, dict[int, np.ndarray]] = {}
        for name, weight in self.weights.items():
            if "act_fn" in name:
                self.stands_for[name] = weight
                continue
            if "in_proj_qkvz" in name:
                yield from self._of_kinds(name, weight)
                continue
            if re.search(OF_ALL_EXPERTS, name):
                yield from self._of_all_experts(name, weight)
                continue
            if "ffn.experts.mlp" in name:
                yield self._of_dbrx(name, weight)
                continue
            if name.endswith("kv_b_proj.weight") and self.arch == "deepseek2":
                yield from self._of_latents(name, weight)
                continue
            value, kind = self._converted(name, weight)
            if re.search(HALVED, name):
                has_experts = self.config.get("num_local_experts")
                for part, half in zip(("gate", "up"), np.split(value, 2), strict=True):
                    place = f"shared_experts.{part}_proj" if has_experts else f"{part}_proj"
                    yield re.sub(r"shared_mlp\.input_linear|block_sparse_moe\.shared", "mlp." + place, name), half, kind
                continue
            found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
            if found is None:
                yield name, value, kind
                continue
            group = waiting.setdefault(f"{found[1]}.{found[3]}", {})
            group[int(found[2])] = value
            if len(group) == self._num_experts:
                yield f"{found[1]}.{found[3]}", np.stack([group[i] for i in range(len(group))]), kind

    @property
    def _num_experts(self) -> int:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        return next((int(self.config[name]) for name in names if self.config.get(name)), 0)

    def _of_kinds(self, name: str, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray, str]]:
        """Queries, keys and values of all heads, and their gates."""
        stored, kind = self._rows(name, weight)
        mixed, gates = by_kind(stored, self.config)
        for place, rows in (("qkv", mixed), ("z", gates)):
            yield name.replace("in_proj_qkvz", f"in_proj_{place}"), rows, kind

    def _of_dbrx(self, name: str, weight: np.ndarray) -> tuple[str, np.ndarray, str]:
        """The rows of all experts, as matrices; the last ones are transposed."""
        experts, turned = (
            weight.reshape(self.config["ffn_config"]["moe_num_experts"], -1, weight.shape[1]),
            "w2" in name,
        )
        stored, kind = self._rows(name, np.ascontiguousarray(experts.swapaxes(1, 2) if turned else experts))
        stood_for = self.stands_for[name]
        rows = np.ascontiguousarray(stood_for.swapaxes(1, 2) if turned else stood_for)
        self.stands_for[name] = rows.reshape(weight.shape)
        return name, stored, kind

    def _of_latents(self, name: str, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray, str]]:
        """The products of latents, for keys and for values."""
        parts, stood_for = latent_parts(weight, self.config), []
        for part, value in zip(("k_b_proj", "v_b_proj"), parts, strict=True):
            named = name.replace("kv_b_proj", part)
            stored, kind = self._converted(named, value)
            stood_for.append(self.stands_for.pop(named))
            yield named, stored, kind
        self.stands_for[name] = joined_latent(*stood_for)

    def _of_all_experts(self, name: str, weight: np.ndarray) -> Iterator[tuple[str, np.ndarray, str]]:
        """The parts of a tensor that has all experts: gate and up are one tensor, or rows that take turns (gpt-oss)."""
        is_gpt_oss, is_bias = self.arch == "gpt-oss", name.endswith("_bias")
        is_transposed = self.arch in ("gpt-oss", "llama4") and not is_bias
        by_row = weight.swapaxes(1, 2) if is_transposed else weight
        stored, kind = self._converted(name, np.ascontiguousarray(by_row))
        if is_transposed:
            self.stands_for[name] = np.ascontiguousarray(self.stands_for[name].swapaxes(1, 2))
        layer, ending = name.rpartition(".layers.")[2].partition(".")[0], "bias" if is_bias else "weight"
        parts: tuple[str, ...] = ("gate_proj", "up_proj")
        if is_gpt_oss and "gate_up" in name:
            values = [stored[:, ::2], stored[:, 1::2]]
        elif "input_linear" in name or "gate_up" in name:
            values = list(np.split(stored, 2, axis=1))
        else:
            parts, values = ("down_proj",), [stored]
        for part, value in zip(parts, values, strict=True):
            yield f"model.layers.{layer}.mlp.experts.{part}.{ending}", np.ascontiguousarray(value), kind

    def _converted(self, name: str, weight: np.ndarray) -> tuple[np.ndarray, str]:
        """What the file has of a tensor, and its type. Remembers what it stands for."""
        if self.arch in ("qwen35", "qwen35moe") and "linear_attn.out_proj" in name:
            stored, kind = self._rows(name, tiled_columns(weight, self.config))
            self.stands_for[name] = tiled_columns(self.stands_for[name], self.config, back=True)
            return stored, kind
        if self.arch == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight", name):
            stored, kind = self._rows(name, np.ascontiguousarray(weight.T))
            self.stands_for[name] = np.ascontiguousarray(self.stands_for[name].T)
            return stored, kind
        return self._rows(name, weight)

    def _rows(self, name: str, weight: np.ndarray) -> tuple[np.ndarray, str]:
        is_matrix = weight.ndim >= 2 and (not re.search(PLAIN, name) or "in_proj" in name)
        of_name = next((kind for part, kind in self.kinds.items() if part in name), self.kind)
        kind = of_name if is_matrix else "F32"
        if weight.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            kind = "F16"  # as llama.cpp does with rows that blocks do not divide
        if kind == "F32":
            self.stands_for[name] = weight
            is_shifted = self.arch in LESS_ONE and name.endswith("norm.weight") and "linear_attn" not in name
            shifted = weight + 1.0 if is_shifted else weight
            shifted = np.squeeze(shifted) if "shared_expert_gate" in name else shifted
            shifted = np.squeeze(shifted) if "moe_statics" in name else shifted
            if self.arch in STATE_SPACES:
                shifted = state_space(name, shifted, self.config)
            return self._arranged(name, shifted), "F32"
        stored = blocks_of(weight, kind, self.generator)
        self.stands_for[name] = dequantize(stored, gguf.GGMLQuantizationType[kind]).reshape(weight.shape)
        return self._arranged(name, stored), kind

    def _arranged(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows in the converter's order."""
        if self.arch in ("qwen35", "qwen35moe") and re.search(r"linear_attn(?!\.out_proj)", name):
            return tiled(name, rows, self.config)
        if self.arch in FUSED_BY_HEAD and "query_key_value" in name:
            return sorted_by_kind(rows, *heads_of(self.config))
        found = re.search(r"self_attn\.([qk])_proj", name)
        if found is None or self.arch not in TAKE_TURNS:
            return rows
        heads = self.config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
        return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    def _add_metadata(self, writer: gguf.GGUFWriter) -> None:
        config, head_size = self.config, self.config.get("head_dim")
        width = int(config.get("hidden_size") or config.get("n_embd") or config["d_model"])
        head_size = head_size or width // (heads_of(config)[0] or 1)
        rope = config.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)
        keys: dict[str, Any] = {
            **{key: config.get(name) for name, key in KEYS.items() if config.get(name) is not None},
            "rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
            "rope.dimension_count": int(head_size * rope.get("partial_rotary_factor", 1.0)),
            "attention.key_length": head_size,
            "attention.value_length": head_size,
        }
        if self.arch == "olmo":
            keys["attention.layer_norm_epsilon"] = 1e-5
        if self.arch == "gpt-oss":
            keys["expert_feed_forward_length"] = config["intermediate_size"]
        if "sliding_attention" in (config.get("layer_types") or ()):
            pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
            writer.add_array(f"{self.arch}.attention.sliding_window_pattern", pattern)
        if rope.get("rope_type") == "yarn":
            keys["rope.scaling.type"] = "yarn"
            keys["rope.scaling.factor"] = rope["factor"]
            keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        own = METADATA[self.arch](config) if self.arch in METADATA else {}
        if self.arch == "apertus":
            own = xielu(self.weights, config["num_hidden_layers"])
        for key, value in {**keys, **own, **self.extra}.items():
            if value is None:
                continue
            if isinstance(value, list):
                writer.add_array(key if key.startswith("xielu") else f"{self.arch}.{key}", value)
                continue
            types = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
            writer.add_key_value(f"{self.arch}.{key}", value, gguf.GGUFValueType[types[type(value)]])


def add_byte_pairs(writer: gguf.GGUFWriter, directory: Path, pre: str = "gpt-2") -> None:
    """The tokenizer of a directory, whose tokenizer.json has byte pairs."""
    described = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in described["added_tokens"]}
    ids = {index: text for text, index in described["model"]["vocab"].items()}
    ids.update({index: token["content"] for index, token in added.items()})
    kinds = [1 if index not in added else 3 if added[index]["special"] else 4 for index in sorted(ids)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([ids[index] for index in sorted(ids)])
    writer.add_token_types(kinds)
    merges = described["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    content = {text: index for index, text in ids.items()}
    for role, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        if config.get(f"{role}_token") is not None:
            add(content[config[f"{role}_token"]])
    if config.get("chat_template"):
        writer.add_chat_template(config["chat_template"])
