"""The Llama network that is trained: the same arithmetic as `LlamaForCausalLM`, with fused projections for speed.

Knows no data and no optimiser. `to_hf_state_dict` gives the names that every Llama loader reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeysValues = tuple[Tensor, Tensor]
Past = list[KeysValues]
"""Of each layer."""
COMPUTE = torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32
"""The type of the activations. With the processor's instructions for it, bfloat16 multiplies matrices at twice the
speed of float32 or more; without them it is some ten times slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """The shape of a model."""

    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    ffn_size: int = 704
    vocab_size: int = 4096
    max_positions: int = 1024
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def to_dict(self) -> dict[str, int | float]:
        """The fields as plain JSON."""
        return asdict(self)


MODELS = {
    "main": TinyConfig(),
    "draft": TinyConfig(hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=1, head_size=64, ffn_size=320),
}


def mixed_precision() -> torch.autocast:
    """Autocast to bfloat16 where the processor is made for it."""
    return torch.autocast("cpu", torch.bfloat16, enabled=COMPUTE is torch.bfloat16)


def rope_tables(config: TinyConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding, each [length, head_size], in the half-rotated layout of Llama."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    angles = torch.outer(torch.arange(length, dtype=torch.float32), config.rope_theta**-exponents)
    return torch.cat((angles, angles), dim=-1).cos(), torch.cat((angles, angles), dim=-1).sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [N, H, T, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attend(query: Tensor, key: Tensor, value: Tensor, past: KeysValues | None) -> Tensor:
    """Causal attention of query [N, K, G * T, D], G heads to a key head, over key and value [N, K, T, D].

    `past` [1, K, P, D] lies before every row: one product for all rows, and nothing is learned from it. The scores are
    explicit: at this size 20 % faster per step than the fused CPU kernel, whose backward pass is slow.
    """
    num_rows, kv_heads, folded, size = query.shape
    length = key.shape[2]
    future = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(folded // length, 1)
    scores = (query @ key.mT).masked_fill(future, -1e9)
    if past is None:
        return scores.softmax(-1) @ value
    past_key, past_value = (each[0] for each in past)
    by_head = query.transpose(0, 1).reshape(kv_heads, num_rows * folded, size)
    before = (by_head @ past_key.mT).view(kv_heads, num_rows, folded, -1).transpose(0, 1)
    weights = torch.cat((before, scores), dim=-1).softmax(-1)
    of_past, own = weights.split((past_key.shape[1], length), dim=-1)
    of_past = of_past.transpose(0, 1).reshape(kv_heads, num_rows * folded, -1)
    return own @ value + (of_past @ past_value).view(kv_heads, num_rows, folded, size).transpose(0, 1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; the result has the dtype of x."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.qkv_proj = nn.Linear(config.hidden_size, (heads + 2 * kv_heads) * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """hidden [N, T, d] -> [N, T, d], causal over T, and the keys and values; `past` are those of one row before."""
        config = self.config
        num_rows, length, _ = hidden.shape
        kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        qkv = self.qkv_proj(self.input_layernorm(hidden)).view(num_rows, length, -1, config.head_size).transpose(1, 2)
        query, key, value = qkv.split((config.num_heads, kv_heads, kv_heads), dim=1)
        query, key = rotate(query, cos, sin) * config.head_size**-0.5, rotate(key, cos, sin)
        mixed = attend(query.reshape(num_rows, kv_heads, group * length, -1), key, value, past)
        mixed = mixed.view(num_rows, kv_heads * group, length, -1).transpose(1, 2)
        hidden = hidden + self.o_proj(mixed.reshape(num_rows, length, -1))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(hidden)).chunk(2, dim=-1)
        return hidden + self.down_proj(F.silu(gate) * up), (key, value)


class TinyLlama(nn.Module):
    """Embedding, layers, final norm; the head is the embedding's transpose."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        cos, sin = rope_tables(config, config.max_positions)
        self.register_buffer("cos", cos.to(COMPUTE), persistent=False)
        self.register_buffer("sin", sin.to(COMPUTE), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scaled normal weights; the projections that end a residual branch start at zero."""
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for layer in self.layers:
            for linear in (layer.qkv_proj, layer.gate_up_proj):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
            nn.init.zeros_(layer.o_proj.weight)
            nn.init.zeros_(layer.down_proj.weight)

    def forward(self, ids: Tensor, past: Past | None = None) -> Tensor:
        """ids [N, T] -> final hidden states [N, T, d]; every row goes on after the `past` of one row (`remember`)."""
        return self.norm(self.run(ids, past)[0])

    @torch.no_grad()
    def remember(self, ids: Tensor) -> Past:
        """Keys and values of a beginning [P] that many rows share: computed once, and not learned from."""
        with mixed_precision():
            return self.run(ids[None], None)[1]

    def run(self, ids: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        """Hidden states after the layers, and the keys and values of each layer."""
        start = past[0][0].shape[2] if past else 0
        cos, sin = (table[start : start + ids.shape[1]] for table in (self.cos, self.sin))
        hidden, seen = self.embed_tokens(ids).to(COMPUTE), []
        for index, layer in enumerate(self.layers):
            hidden, keys_values = layer(hidden, cos, sin, past[index] if past else None)
            seen.append(keys_values)
        return hidden, seen

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary for the given hidden states."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))


def to_hf_state_dict(config: TinyConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names of `LlamaForCausalLM`, bfloat16, with the head tied (absent)."""
    q_rows, kv_rows = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    out = {"model.embed_tokens.weight": state["embed_tokens.weight"], "model.norm.weight": state["norm.weight"]}
    for index in range(config.num_layers):
        source, target = f"layers.{index}.", f"model.layers.{index}."
        query, key, value = state[source + "qkv_proj.weight"].split((q_rows, kv_rows, kv_rows))
        gate, up = state[source + "gate_up_proj.weight"].chunk(2)
        out |= {
            target + "input_layernorm.weight": state[source + "input_layernorm.weight"],
            target + "self_attn.q_proj.weight": query,
            target + "self_attn.k_proj.weight": key,
            target + "self_attn.v_proj.weight": value,
            target + "self_attn.o_proj.weight": state[source + "o_proj.weight"],
            target + "post_attention_layernorm.weight": state[source + "post_attention_layernorm.weight"],
            target + "mlp.gate_proj.weight": gate,
            target + "mlp.up_proj.weight": up,
            target + "mlp.down_proj.weight": state[source + "down_proj.weight"],
        }
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in out.items()}


def from_hf_state_dict(config: TinyConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_hf_state_dict`, in float32."""
    out = {"embed_tokens.weight": tensors["model.embed_tokens.weight"], "norm.weight": tensors["model.norm.weight"]}
    for index in range(config.num_layers):
        source, target = f"model.layers.{index}.", f"layers.{index}."
        projections = [tensors[f"{source}self_attn.{name}_proj.weight"] for name in "qkv"]
        halves = [tensors[f"{source}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        out |= {
            target + "qkv_proj.weight": torch.cat(projections),
            target + "gate_up_proj.weight": torch.cat(halves),
            target + "o_proj.weight": tensors[source + "self_attn.o_proj.weight"],
            target + "down_proj.weight": tensors[source + "mlp.down_proj.weight"],
        }
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            out[target + name] = tensors[source + name]
    return {name: tensor.float() for name, tensor in out.items()}
