"""What a FamilySpec may say one thing at a time and the decoder does not compute together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.config.family_spec import HeadNorms, MlpKind
from quire.config.layers.layer_kinds import Heads, all_full, heads_alike
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.config.arch import ModelArch


def check_joins(arch: ModelArch) -> None:
    """Refuse what a plug-in's spec may say and the decoder does not compute. Raises: ConfigError."""
    norms, scales, names = arch.norms, arch.scales, arch.family.names
    if arch.is_parallel and (norms.post_attention or norms.post_mlp or scales.residual != 1.0):
        problem = "norms behind parallel attention and MLP, or a factor of their sum"
    elif scales.averages and (
        not (norms.input and norms.pre_mlp and norms.final)
        or arch.is_parallel
        or norms.skips_first
        or any(len(layer.mixers) != 1 or layer.mlp.kind is MlpKind.NONE for layer in arch.layers)
    ):
        problem = "averages that something else than a norm reads, or of other layers than attention and an MLP"
    elif not scales.attention.are_ones and (names.qkv_by_head or names.qkv_groups is not None):
        problem = "factors of queries, keys and values that one tensor has by head"
    elif arch.family.gates_heads is not False and names.gate is None:
        problem = "gates of heads behind queries"
    elif names.gate_bias is not None and names.gate is None:
        problem = "a bias of gates that are behind queries"
    elif arch.head_transform is not None or scales.of_features is not None or scales.has_shifts:
        problem = "a product before the head, or factors or shifts of the residual's features"
    elif arch.is_convolved or any(experts.router for experts in arch.mixtures):
        problem = "convolved queries and keys, or routers of several products"
    elif any(mixer.biases_keys for mixer in arch.plain_attentions) and _has_more_than_biased_keys(arch):
        problem = "biases of keys beside gates, factors, experts or fused tensors, or without norms of heads"
    elif (arch.is_gated and names.gate is None) and (
        not scales.attention.are_ones or len(names.qkv) != len(("query", "key", "value"))
    ):
        problem = "gates behind queries with factors, or with queries, keys and values in one tensor"
    elif scales.logits != 1.0 and (norms.final is None or arch.head_bias):
        problem = "a factor of logits without a last norm, or with a bias of the head"
    elif arch.family.is_chunked and (
        arch.attn_soft_cap is not None or any(mixer.slopes or mixer.has_sinks for mixer in arch.plain_attentions)
    ):
        problem = "attention in chunks with a soft cap, slopes or sinks"
    elif scales.joins is not None and (
        not (norms.input and norms.pre_mlp)
        or norms.post_attention
        or norms.post_mlp
        or arch.is_parallel
        or scales.residual != 1.0
        or any(len(layer.mixers) != 1 or layer.mlp.kind is MlpKind.NONE for layer in arch.layers)
    ):
        problem = "joins without a norm before attention and MLP each, or with norms behind them or another factor"
    elif arch.family.latent is not None and (
        norms.heads is not HeadNorms.NONE or scales.query is not None or arch.family.layer_kinds is not all_full
    ):
        problem = "latent attention with norms of heads, a factor of queries, or windows"
    elif arch.hyper is not None or arch.family.compressed is not None or arch.sphere is not None:
        problem = "hyper-connections, compressed attention, or hidden states of length 1"
    elif arch.streams is not None or any(mixer.shared is not None for mixer in arch.plain_attentions):
        problem = "several streams of hidden states, or attention that layers share"
    elif arch.layer_embeddings is not None or scales.of_layers or any(mlp.beside for mlp in arch.mlps):
        problem = "embeddings or factors of single layers, or experts beside an MLP"
    elif _has_own_heads(arch) and (
        arch.recurrences
        or len(names.qkv) != len(("query", "key", "value"))
        or names.qkv_by_head
        or names.qkv_groups is not None
        or not replace(scales.attention, output=1.0).are_ones
        or (arch.is_gated and names.gate is None)
        or norms.heads in (HeadNorms.WHOLE, HeadNorms.LAYER, HeadNorms.LAYER_OWN)
        or any(mixer.experts for mixer in arch.plain_attentions)
    ):
        problem = "heads of single layers, or values that are keys, with states, experts, whole norms or fused tensors"
    elif any(mixer.heads.num_unused for mixer in arch.plain_attentions) and (
        arch.is_gated
        or norms.of_values
        or any(mixer.heads.values_are_keys or mixer.reads is not None for mixer in arch.plain_attentions)
    ):
        problem = "values narrower than keys that have gates or norms, are keys, or are another layer's"
    elif (norms.attended or norms.gated) and (
        len(arch.plain_attentions) != len(arch.mixers)
        or arch.is_gated
        or any(mixer.experts for mixer in arch.plain_attentions)
        or any(mixer.heads.num_unused for mixer in arch.plain_attentions)
        or any(mlp.kind is not MlpKind.GATED for mlp in arch.mlps)
    ):
        problem = "norms before last products, of other mixers than plain attention or other MLPs than gated ones"
    elif norms.of_values and norms.heads in (HeadNorms.WHOLE, HeadNorms.LAYER, HeadNorms.LAYER_OWN):
        problem = "norms of values beside norms over all heads, or layer norms of heads"
    elif any(mixer.reads is not None for mixer in arch.plain_attentions) and (
        len(arch.attentions) != len(arch.mixers)
        or any(len(layer.mixers) != 1 for layer in arch.layers)
        or arch.is_gated
        or names.qkv_by_head
        or len(names.qkv) != len(("query", "key", "value"))
        or not scales.attention.are_ones
        or norms.heads not in (HeadNorms.NONE, HeadNorms.EACH)
    ):
        problem = "layers that read the keys and values of others, with other mixers, gates, factors or norms of heads"
    else:
        return
    raise ConfigError(f"{arch.source}: the FamilySpec of {arch.architecture!r} has {problem}: that needs a class.")


def _has_more_than_biased_keys(arch: ModelArch) -> bool:
    names = arch.family.names
    return (
        arch.norms.heads is not HeadNorms.EACH
        or arch.norms.of_values
        or arch.norms.attended is not None
        or arch.is_gated
        or len(names.qkv) != len(("query", "key", "value"))
        or names.qkv_by_head
        or names.qkv_groups is not None
        or not arch.scales.attention.are_ones
        or arch.clip_qkv is not None
        or arch.family.heads is not heads_alike
        or any(mixer.experts or mixer.blocks or mixer.reads is not None for mixer in arch.plain_attentions)
    )


def _has_own_heads(arch: ModelArch) -> bool:
    """Whether layers have other heads than Llama's keys name."""
    named = Heads(num_heads=arch.num_heads, num_kv_heads=arch.num_kv_heads, head_size=arch.head_size)
    return any(mixer.heads != named for mixer in arch.plain_attentions)
