"""The ops that layers call: their contracts. `ops.reference` is the executable specification, `ops.cpu` the fast one.

Shape letters: T tokens in this step, R requests (sequences), H query heads, K key/value heads, D head size, E hidden
size, N and M output and input features of a linear layer, F inner features of an MLP, X experts, B blocks, S slots
(tokens) per block, V vocabulary.

Conventions that hold for every op:
- Activations are contiguous and of the model's dtype (float32, bfloat16, float16); sums run in float32 and are rounded
  once, on the way out.
- Norm weights, biases and rotary tables are float32 whatever the model's dtype, so that nothing is lost by folding.
- **Row invariance.** The result for one row (token, sequence) does not depend on how many rows stand beside it, on
  which, on how its context was split into chunks, or on the number of threads. Bit for bit.
- Nothing is validated here: callers guarantee shapes. Inputs are never modified unless "Mutates" says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quire.ops.contracts.selection import SelectionOps
from quire.utils.threads import give_way

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, dtype

    from quire.config.layers.experts import ClampedGate, Routing
    from quire.ops.backends import Op
    from quire.ops.contracts.operands import (
        AttentionExpertWeights,
        AttentionMetadata,
        BlockTable,
        Graphs,
        HeadWeights,
        LatentSpec,
        LinearWeight,
        MixtureWeights,
        RopeAndCacheSpec,
        StoredRows,
    )


class Ops(SelectionOps):
    """The ops of one engine. Engines in one process may have different ones, and different numbers of threads."""

    def __init__(
        self,
        name: str,
        table: Mapping[str, Op],
        *,
        device: str = "cpu",
        prepare_thread: Callable[[], None] | None = None,
        compute_in_bursts: Callable[[], None] | None = None,
    ) -> None:
        """`table` has a callable for each method below; see `backends.ops_of`."""
        self.name = name
        """Of the implementation."""
        self.device = device
        """Of the tensors that ops take and give, as torch spells it."""
        self._table = table
        self._prepare_thread = prepare_thread
        self._compute_in_bursts = compute_in_bursts

    def use_this_thread(self) -> None:
        """Have the calling thread compute as this engine is configured, whoever computed on it before."""
        if self._prepare_thread is not None:
            self._prepare_thread()

    def give_way(self) -> None:
        """Have the calling thread compute only where a core is nearly free, and in bursts, until it ends.

        See `quire.utils.threads.give_way` on when to call it.
        """
        give_way()
        if self._compute_in_bursts is not None:
            self._compute_in_bursts()

    def on_device(self, host: Tensor) -> Tensor:
        """A tensor of the host where ops read it, which may be where it is."""
        return host if self.device == "cpu" else host.to(self.device, non_blocking=True)

    def make_graphs(self) -> Graphs:
        """An empty set of graphs."""
        return cast("Graphs", self._table["make_graphs"]())

    def pack_linear(self, parts: Sequence[Tensor], *, dtype: dtype) -> LinearWeight:
        """Concatenate weights [N_i, M] along N, convert to dtype, and lay them out for streaming.

        The parts may be views of a memory-mapped file; they are read once and not kept.
        """
        return cast("LinearWeight", self._table["pack_linear"](parts, dtype=dtype))

    def quantize_linear(self, parts: Sequence[Tensor], *, format: str) -> LinearWeight:
        """Like `pack_linear`, each output feature, or each group of its inputs, rounded to integers times a scale.

        format: "int8" (one scale for an output feature), "int4_g32", "int4_g64", "int4_g128" (one for so many inputs).
        Not every implementation has it; `resolve` refuses quantisation where it is missing.
        """
        return cast("LinearWeight", self._table["quantize_linear"](parts, format=format))

    def pack_quantized(self, parts: Sequence[StoredRows | Tensor]) -> LinearWeight:
        """Concatenate rows that a checkpoint brings quantised along N, and lay them out for streaming; values stay.

        The parts may be of different formats, and tensors [N_i, M] among them, which keep their dtype: float32,
        bfloat16 or float16. Blocks may be views of a memory-mapped file; they are not kept. Not every implementation
        has every format. Raises: ConfigError for one that it has not.
        """
        return cast("LinearWeight", self._table["pack_quantized"](parts))

    def weights_together(self) -> AbstractContextManager[None]:
        """Weights that are packed within share regions of memory, each of which lives as long as any weight in it."""
        return cast("AbstractContextManager[None]", self._table["weights_together"]())

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        residual: Tensor | None = None,
        out_dtype: dtype | None = None,
    ) -> Tensor:
        """activation(x @ weight.T + bias) + residual.

        Shapes: x [T, M], bias [N] float32, residual [T, N] -> [T, N] in out_dtype (default: x's dtype).
        activation: None, "silu", "gelu", "gelu_tanh", "relu" or "relu2", which is max(x, 0)^2.
        """
        return cast(
            "Tensor",
            self._table["linear"](x, weight, bias, activation=activation, residual=residual, out_dtype=out_dtype),
        )

    def linear_max(
        self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, soft_cap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """`row_max_tensors` of `linear` in float32, after `soft_cap` if there is one: the same bits.

        An implementation may spare the outputs themselves, which are large: a head's are all logits.
        Shapes: x [T, M], bias [N] float32 -> [T] float32, [T] int64.
        """
        return cast("tuple[Tensor, Tensor]", self._table["linear_max"](x, weight, bias, soft_cap=soft_cap))

    def gated_linear(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None, *, activation: str) -> Tensor:
        """activation(gate) * up, where gate and up are the first and second half of x @ weight.T + bias.

        Shapes: x [T, M], weight [2F, M], bias [2F] float32 -> [T, F] in x's dtype. activation as in `linear`, not None.
        """
        return cast("Tensor", self._table["gated_linear"](x, weight, bias, activation=activation))

    def mixture_of_experts(
        self,
        x: Tensor,
        weights: MixtureWeights,
        routing: Routing,
        *,
        activation: str | ClampedGate,
        residual: Tensor | None = None,
        routed: Tensor | None = None,
        given: Tensor | None = None,
    ) -> Tensor:
        """Each token's experts, weighed and added up, and the shared one; plus residual.

        1. logits = x @ router.T + router_bias in float32, or of `routed` where the router reads something else than x,
           of any width and dtype.
        2. `routing` chooses each token's experts and their weights; the scales of the experts multiply these. Where
           experts are `given`, of which one may be there twice, it only weighs them.
        3. Each expert that is touched computes all of its tokens at once, as `gated_linear` and `linear` do. Where the
           routing says so, it reads weight * x, and the weight of its output is 1.
        4. In float32, for each token: the sum of weight * output in the order of the experts' indices, then the shared
           expert's output (times the sigmoid of its gate, if there is one, and its factor), then x times the sum of the
           weights of identities, then the residual. Skips give nothing.
        Shapes: x [T, M], routed [T, P], residual [T, N], given [T, num_chosen] int32 -> [T, N] in x's dtype.
        activation as in `gated_linear`, or a `ClampedGate`, which takes the float32 sums of gate and up; of experts
        without a gate "quick_gelu", too, as `activate` has it.
        """
        return cast(
            "Tensor",
            self._table["mixture_of_experts"](
                x, weights, routing, activation=activation, residual=residual, routed=routed, given=given
            ),
        )

    def expert_queries(
        self, x: Tensor, keys_values: Tensor, weights: AttentionExpertWeights, routing: Routing, head_size: int
    ) -> Tensor:
        """Each token's queries, which are those of its experts, before its keys and values.

        An expert gives one query for each KV head. The H = K * num_chosen query heads are ordered by KV head, so that
        those that share one are neighbours. Routing as in `mixture_of_experts`.
        Shapes: x [T, M], keys_values [T, 2 * K * D] -> [T, (H + 2 * K) * D] in x's dtype.
        """
        return cast("Tensor", self._table["expert_queries"](x, keys_values, weights, routing, head_size))

    def expert_outputs(
        self,
        attended: Tensor,
        x: Tensor,
        weights: AttentionExpertWeights,
        routing: Routing,
        head_size: int,
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """What the experts of each token make of their heads, weighed and added up in float32; plus bias and residual.

        x is what `expert_queries` was given: it is routed the same.
        Shapes: attended [T, H * D], x [T, M], residual [T, N] -> [T, N] in x's dtype.
        """
        return cast(
            "Tensor", self._table["expert_outputs"](attended, x, weights, routing, head_size, residual=residual)
        )

    def embedding(self, token_ids: Tensor, table: Tensor | LinearWeight | BlockTable) -> Tensor:
        """Rows of a table, of the packed weight of a tied head, or of a table in blocks, rounded once to its dtype.

        Shapes: token_ids [T] int64, table [V, E] -> [T, E].
        """
        return cast("Tensor", self._table["embedding"](token_ids, table))

    def scale_add(self, x: Tensor, scale: float, residual: Tensor | None = None) -> Tensor:
        """x * scale + residual. Shapes: x, residual [T, E] -> [T, E]."""
        return cast("Tensor", self._table["scale_add"](x, scale, residual))

    def activate(self, x: Tensor, activation: str, parameters: tuple[float, ...] = ()) -> None:
        """An activation that `linear` does not have, in place.

        activation, parameters:
        - "quick_gelu": x * sigmoid(1.702 * x)
        - "xielu", (p, n, beta, eps): p * x^2 + beta * x above zero, else n * (expm1(min(x, eps)) - x) + beta * x
          (Huang 2024, arXiv:2411.13010).
        Shapes: x [T, F]. Mutates: x.
        """
        self._table["activate"](x, activation, parameters)

    def clip(self, x: Tensor, limit: float) -> None:
        """min(max(x, -limit), limit), in place. Shapes: x [T, N]. Mutates: x."""
        self._table["clip"](x, limit)

    def gate(self, x: Tensor, gates: Tensor, activation: str = "sigmoid") -> None:
        """x * activation(gates), in place; each gate is that of N / G neighbours. activation: sigmoid or softplus.

        Shapes: x [T, N], gates [T, G]. Mutates: x.
        """
        self._table["gate"](x, gates, activation)

    def gated_activation(self, both: Tensor, activation: str | ClampedGate) -> Tensor:
        """activation(gate) * up, where gate and up are the first and second half of each row.

        Shapes: both [T, 2F] -> [T, F]. activation as in `gated_linear`, or a `ClampedGate`.
        """
        return cast("Tensor", self._table["gated_activation"](both, activation))

    def pair_values(self, qkv: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
        """Queries and keys with zeros behind each, and for each KV head j the values of j' and j' + K / 2 behind each
        other, j' being j modulo K / 2. Shapes: qkv [T, (H + 2 * K) * D] -> [T, (H + 2 * K) * 2 * D].
        """
        return cast("Tensor", self._table["pair_values"](qkv, num_heads, num_kv_heads))

    def bias_keys(
        self, query: Tensor, key: Tensor, value: Tensor, times: Tensor, decay: Tensor, scale: float
    ) -> Tensor:
        """Queries, keys and values with 4 more features each, by which each score gains exp(decay * softplus(time)).

        They are s, s, 0, 0 of a query, s being 1 / scale in x's dtype; of a key the number that s * scale times gives
        the gain, what its rounding lost, 0 and 0; and zeros of a value.
        Shapes: query [T, H * D], key and value [T, K * D], times [T, K] float32, decay [K] float32 ->
        [T, (H + 2 * K) * (D + 4)].
        """
        return cast("Tensor", self._table["bias_keys"](query, key, value, times, decay, scale))

    def subtract_heads(self, x: Tensor, factor: float) -> Tensor:
        """The first half of each row less factor * the second. Shapes: x [T, 2 * N] -> [T, N]."""
        return cast("Tensor", self._table["subtract_heads"](x, factor))

    def join_columns(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows beside each other. Shapes: parts [T, N] each -> [T, sum of N]."""
        return cast("Tensor", self._table["join_columns"](parts))

    def multiply_columns(self, x: Tensor, by: Tensor, *, first: int) -> None:
        """x * as many columns of `by`, from `first` on, in place. Shapes: x [T, N], by [T, M]. Mutates: x."""
        self._table["multiply_columns"](x, by, first=first)

    def match_rms(self, x: Tensor, like: Tensor, least: float) -> Tensor:
        """x * sqrt(mean(like^2) / max(mean(x^2), least)), with the means of each row. Shapes: x, like [T, E] -> [T, E].

        Sums over E add the second half to the first, again and again; so do those of `statistical_top_k`.
        """
        return cast("Tensor", self._table["match_rms"](x, like, least))

    def mix_streams(
        self,
        streams: Sequence[Tensor],
        inputs: Sequence[Tensor],
        routed: Tensor,
        weight: Tensor,
        *,
        scale: float,
        offset: float = 0.0,
    ) -> list[Tensor]:
        """Each stream, plus the sum over the inputs of coefficient * input (AltUp, https://arxiv.org/abs/2301.13310).

        A token's coefficients are weight @ tanh(routed * scale) + offset: those of all I inputs for the first stream,
        then for the second.
        Shapes: streams, inputs [T, E] each, routed [T, S] float32, weight [S * I, S] float32 -> S of [T, E].
        """
        return cast(
            "list[Tensor]",
            self._table["mix_streams"](streams, inputs, routed, weight, scale=scale, offset=offset),
        )

    def statistical_top_k(self, x: Tensor, size: int, cutoff: float) -> None:
        """max(x - (mean + cutoff * deviation), 0) of the first `size` columns, in place.

        Mean and standard deviation are those of these columns of the row. Shapes: x [T, N]. Mutates: x.
        """
        self._table["statistical_top_k"](x, size, cutoff)

    def scale_shift(self, x: Tensor, weights: Tensor, residual: Tensor | None = None) -> None:
        """(x + shift) * scale, plus the same of the residual with a scale and a shift of its own, in place.

        Shapes: x, residual [T, E], weights [2 or, with a residual, 4, E] float32: scale and shift of each. Mutates: x.
        """
        self._table["scale_shift"](x, weights, residual)

    def scale_heads(self, x: Tensor, weight: Tensor) -> None:
        """x * weight, in place. Shapes: x [T, H, D], weight [D] or [H, D] float32. Mutates: x."""
        self._table["scale_heads"](x, weight)

    def scale_tokens(self, x: Tensor, scales: Tensor, positions: Tensor) -> None:
        """x * scales[positions], in place. Shapes: x [T, H, D], scales [P] float32, positions [T] int64. Mutates: x."""
        self._table["scale_tokens"](x, scales, positions)

    def soft_cap(self, logits: Tensor, cap: float) -> None:
        """cap * tanh(logits / cap), in place. Shapes: logits [R, V] float32. Mutates: logits."""
        self._table["soft_cap"](logits, cap)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight + residual.

        Shapes: x [T, E], weight [E] float32, residual [T, E] -> [T, E].
        """
        return cast("Tensor", self._table["rms_norm"](x, weight, eps, residual=residual))

    def rms_norm_columns(self, x: Tensor, weight: Tensor, eps: float, *, first: int) -> None:
        """`rms_norm` of the columns from `first` on of each row, as many as the weight has, in place.

        Shapes: x [T, N], weight [E] float32, first + E <= N. Mutates: x.
        """
        self._table["rms_norm_columns"](x, weight, eps, first=first)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias. Shapes: x [T, E], weight and bias [E] float32 -> [T, E]."""
        return cast("Tensor", self._table["layer_norm"](x, weight, bias, eps))

    def layer_norm_heads(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, first: int, num_heads: int
    ) -> None:
        """`layer_norm` of each of `num_heads` heads by itself, in place; the first one begins at column `first`.

        Shapes: x [T, N], weight [W, D] float32, W being 1 for all heads alike or num_heads, bias as weight or None,
        first + num_heads * D <= N. Mutates: x.
        """
        self._table["layer_norm_heads"](x, weight, bias, eps, first=first, num_heads=num_heads)

    def rope_and_cache(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        spec: RopeAndCacheSpec,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Each token's query, after splitting QKV, normalising heads (RMS, optional), rotating, and writing the cache.

        scales are for caches of 8 bits: what keys and values of each kv head are divided by, instead of each token's
        own; quotients too large for the type become its largest.

        Shapes: qkv [T, (H + 2K) * D], positions [T] int64, cos_sin [max_position, rotary_dim] float32 (cosines of the
        rotary_dim/2 frequencies, then their sines), q_norm and k_norm [D] float32, slot_mapping [T] int64 (block * S +
        slot), scales [2 (keys, values), K] float32 -> query [T, H, D]. Without cos_sin nothing is rotated.
        Where `spec` has no KV heads, nothing is written, and D need not be that of the cache.
        Mutates: kv_cache, at the slots named.
        """
        return cast(
            "Tensor",
            self._table["rope_and_cache"](
                qkv, positions, cos_sin, q_norm, k_norm, kv_cache, slot_mapping, spec, scales
            ),
        )

    def latent_qkv(
        self,
        query: Tensor,
        compressed: Tensor,
        norm: Tensor,
        to_latents: HeadWeights,
        spec: LatentSpec,
        index_key: Tensor | None = None,
    ) -> Tensor:
        """Queries, the key and the value of attention over latents, as `rope_and_cache` takes them for one KV head.

        1. The latent of a token is `rms_norm` of the first C features of `compressed`; the other P are its key before
           the rotation.
        2. Head h takes the U features of its query that are not rotated to the latents by a product with its weight.
        3. query head h: [its P features before the rotation | product | zeros]; key: [key | latent | zeros]; value:
           [zeros | latent | zeros]. An index key takes the place of the key's last zeros: scores of attention do not
           see it, for queries have zeros there.
        Shapes: query [T, H * (U + P)], compressed [T, C + P], norm [C] float32, to_latents of [C, U], index_key [T, I]
        -> [T, (H + 2) * D].
        """
        return cast("Tensor", self._table["latent_qkv"](query, compressed, norm, to_latents, spec, index_key))

    def latent_values(self, attended: Tensor, to_values: HeadWeights, spec: LatentSpec) -> Tensor:
        """Each head's values of the latents that it attended to, by a product with a weight of its own.

        Shapes: attended [T, H * D], whose heads' features from P to P + C are read, to_values of [W, C]
        -> [T, H * W].
        """
        return cast("Tensor", self._table["latent_values"](attended, to_values, spec))

    def allocate_kv_cache(
        self, *, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: dtype
    ) -> Tensor:
        """Uninitialised keys and values of one layer in the implementation's layout; dimension 1 is the block.

        The reference layout is [2, B, K, S, D]: one head's page is contiguous. Memory is committed when first written.
        dtype may differ from the model's. int8 and float8_e4m3fn keep each token's key and value of each kv head as
        numbers of 8 bits times a float32 scale, the head's largest magnitude over 127 or 448; a page holds its scales.

        Ops that read or write a cache also take a view of such a shape into a larger pool, whose blocks lie further
        apart (dimension 1 has a larger stride); `copy_blocks` and `touch_blocks` take whole pools.
        """
        return cast(
            "Tensor",
            self._table["allocate_kv_cache"](
                num_blocks=num_blocks,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_size=head_size,
                dtype=dtype,
            ),
        )

    def copy_blocks(self, kv_caches: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks within each layer's cache, pair by pair in order. Mutates: kv_caches."""
        self._table["copy_blocks"](kv_caches, pairs)

    def touch_blocks(self, kv_cache: Tensor, begin: int, end: int) -> None:
        """Have memory in place behind blocks [begin, end) of one layer, so that no op that writes them waits for it.

        Implementations without such a wait do nothing. What blocks hold stays; may run beside other ops, in any thread.
        """
        self._table["touch_blocks"](kv_cache, begin, end)

    def paged_attention(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of this step's tokens over the cached keys and values, prefill and decode alike.

        Token t of sequence r at context position p sees positions max(0, p - sliding_window + 1) .. p. Blocks in which
        none of the step's tokens sees a position are not read: their entries of the table may name any block. Scores
        are query . key * scale, then soft_cap * tanh(score / soft_cap) when given, then less slope * distance when
        given (ALiBi, Press et al. 2022). A sink is a score of no token: it takes its share of the softmax and adds
        nothing. Query head h reads kv head h // (H / K).

        Shapes: query [T, H, D], kv_cache as allocated, slopes and sinks [H] float32 -> [T, H * D] in query's dtype.
        """
        return cast(
            "Tensor",
            self._table["paged_attention"](
                query,
                kv_cache,
                metadata,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                slopes=slopes,
                sinks=sinks,
            ),
        )

    def chunked_attention(
        self, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata, *, scale: float, chunk_size: int
    ) -> Tensor:
        """Causal attention within chunks of the context: position p sees p // chunk_size * chunk_size .. p.

        Otherwise as `paged_attention`. chunk_size is a multiple of the block size.
        """
        return cast(
            "Tensor", self._table["chunked_attention"](query, kv_cache, metadata, scale=scale, chunk_size=chunk_size)
        )

    def row_max(self, logits: Tensor) -> tuple[list[float], list[int]]:
        """The largest logit of each row and its token, the lowest id on a tie; NaN counts as the largest.

        Both for the host, which decides by them: a step that needs nothing else of torch is spared its working set.
        Shapes: logits [R, V] float32 -> [R], [R].
        """
        return cast("tuple[list[float], list[int]]", self._table["row_max"](logits))

    def row_max_tensors(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`row_max` left on the device, for a step that goes on before the host has looked.

        Shapes: logits [R, V] float32 -> [R] float32, [R] int64.
        """
        return cast("tuple[Tensor, Tensor]", self._table["row_max_tensors"](logits))

    def allowed_max(self, logits: Tensor, rows: Tensor, masks: Tensor) -> tuple[list[float], list[int]]:
        """`row_max` of row `rows[i]` among the tokens that `masks[i]` allows; (-inf, 0) where it allows none.

        Bit b of word w stands for token 32 * w + b; bits beyond V count for nothing.
        Shapes: logits [R, V] float32, rows [M] int64, masks [M, ceil(V / 32)] int32 -> [M], [M].
        """
        return cast("tuple[list[float], list[int]]", self._table["allowed_max"](logits, rows, masks))

    def top_logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """float32 log-softmax of each row: that of the chosen token, its rank, and the k best.

        Ties are broken by the lower token id, in list and rank, so the best 5 are always a prefix of the best 20.
        Shapes: logits [R, V] float32, chosen [R] int64 -> chosen logprobs [R], ranks [R] int64 (1 = best), top ids [R,
        k] int64, top logprobs [R, k].
        """
        return cast("tuple[Tensor, Tensor, Tensor, Tensor]", self._table["top_logprobs"](logits, chosen, k))

    def apply_penalties(
        self,
        logits: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        in_prompt: Tensor,
        output_counts: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """Repetition, then frequency and presence penalties, at the (row, token) pairs that occurred.

        logit > 0 is divided by the repetition penalty, otherwise multiplied (if the token stands in prompt or output);
        then frequency * count and presence * (count > 0) are subtracted, count being its occurrences in the output.
        Shapes: logits [R, V] float32, the pairs rows and token_ids [P] int64 without repeats, in_prompt [P] bool,
        output_counts [P] int64, the penalties [R] float32.
        Mutates: logits.
        """
        self._table["apply_penalties"](
            logits, rows, token_ids, in_prompt, output_counts, repetition, presence, frequency
        )

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniforms: Tensor,
        mask_of: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Draw tokens: temperature, then min-p, then top-k, then top-p, then one uniform number per draw.

        Defined in integers, so that every implementation draws the same token:
        1. weight = round(2**40 * exp((logit - largest logit of the row) / temperature)), in float64, half to even.
        2. min-p keeps weights of at least min_p * 2**40, top-k the first k in order of weight (ties by lower token id).
        3. top-p keeps, in that order, the shortest run of what is left whose sum reaches ceil(top_p * total), the
           product in float64 and total being the sum of what is left; a top_p of 1 keeps all.
        4. The token drawn is the first, in order of token id, at which the running sum of the kept weights exceeds
           floor(uniform * sum), the product in float64 and its floor at most sum - 1.
        So a draw is a pure function of the row and the number, and nothing needs sorting unless something truncates.
        With masks, row r draws as if the logits were -inf of the tokens that `masks[mask_of[r]]` does not allow (see
        `allowed_max`), and any token where `mask_of[r]` is -1. A row that is allowed none draws token 0.
        Shapes: logits [R, V] float32 (V <= 2**22; -inf excludes a token, at least one of each row is finite, none is
        NaN or +inf), temperature > 0, top_p, min_p [R] float32, top_k [R] int64 (0 keeps all), uniforms [R, n] float64
        in [0, 1) mask_of [R] int64, masks [M, ceil(V / 32)] int32 -> [R, n] int64.
        """
        return cast("Tensor", self._table["sample"](logits, temperature, top_k, top_p, min_p, uniforms, mask_of, masks))
