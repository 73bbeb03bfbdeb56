"""The tensors beside the layers of a model: of streams of hidden states, and of embeddings that layers have."""

from __future__ import annotations

from quire.config.arch import ModelArch
from quire.config.memory.weights.linear import LinearShape


def stream_linears(arch: ModelArch) -> list[LinearShape]:
    """Linear layers of streams and of embeddings of single layers."""
    return [*_of_streams(arch), *_of_hyper(arch), *_of_gated(arch), *_of_layer_embeddings(arch)]


def _of_streams(arch: ModelArch) -> list[LinearShape]:
    streams, size, layers = arch.streams, arch.hidden_size, arch.num_layers
    if streams is None:
        return []
    rank = streams.laurel_rank
    return [
        LinearShape(parts=(size,), in_features=size, count=2 * (streams.count - 1)),
        LinearShape(parts=(streams.count,), in_features=size, count=layers, dtype="float32"),
        LinearShape(parts=(rank,), in_features=size, count=layers),
        LinearShape(parts=(size,), in_features=rank, count=layers),
    ]


def _of_hyper(arch: ModelArch) -> list[LinearShape]:
    """Of hyper-connections, whose products stay in float32: two for each layer, and one behind the last."""
    hyper = arch.hyper
    if hyper is None:
        return []
    size = hyper.count * arch.hidden_size
    return [
        LinearShape(parts=(hyper.num_products,), in_features=size, count=2 * arch.num_layers, dtype="float32"),
        LinearShape(parts=(hyper.count,), in_features=size, dtype="float32"),
    ]


def _of_gated(arch: ModelArch) -> list[LinearShape]:
    """Of streams behind gates: two readings for each layer, which also write, and one behind the last."""
    spec = arch.gated_streams
    if spec is None:
        return []
    width, count = spec.count * arch.hidden_size, 2 * arch.num_layers
    return [
        LinearShape(parts=(spec.rank,), in_features=width, count=count + 1),
        LinearShape(parts=(width,), in_features=spec.rank, count=count + 1),
        LinearShape(parts=(spec.count,), in_features=width, count=count, dtype="float32"),
    ]


def num_equal(arch: ModelArch) -> int:
    """Equal weights of norms of streams, whose own weights multiply what these give."""
    return 0 if arch.gated_streams is None else arch.hidden_size


def sphere_floats(arch: ModelArch) -> int:
    """Shares of the residual and of what is added to it, what multiplies queries and logits, and equal weights of
    norms, one for each size."""
    if arch.sphere is None:
        return 0
    query, inner = arch.num_heads * arch.head_size, arch.intermediate_size
    equal = arch.hidden_size + arch.head_size + query + inner
    return arch.num_layers * (4 * arch.hidden_size + query) + equal + arch.vocab_size


def num_sphere_parameters(arch: ModelArch) -> int:
    """What the checkpoint has in place of them, and of factors that weights carry."""
    if arch.sphere is None:
        return 0
    of_layer = 2 * arch.hidden_size + 2 * arch.num_heads * arch.head_size + 2 * arch.intermediate_size
    return arch.num_layers * of_layer + arch.vocab_size


def num_repeated(arch: ModelArch) -> int:
    """Numbers of scales of hyper-connections that are there once for each product, and in the checkpoint once for all
    that read, add or mix."""
    hyper = arch.hyper
    return 0 if hyper is None else 2 * arch.num_layers * (hyper.num_products - len(hyper.parts)) + hyper.count - 1


def _of_layer_embeddings(arch: ModelArch) -> list[LinearShape]:
    spec, size, layers = arch.layer_embeddings, arch.hidden_size, arch.num_layers
    if spec is None:
        return []
    return [
        LinearShape(parts=(layers * spec.size,), in_features=size),
        LinearShape(parts=(spec.size,), in_features=size, count=layers),
        LinearShape(parts=(size,), in_features=spec.size, count=layers),
    ]


def num_layer_embeddings(arch: ModelArch) -> int:
    """Numbers of the table that has the embeddings of all layers."""
    spec = arch.layer_embeddings
    return 0 if spec is None else spec.vocab_size * arch.num_layers * spec.size + num_copied(arch)


def num_copied(arch: ModelArch) -> int:
    """Embeddings of single layers, of tokens that the checkpoint has none for: they are those of the first token."""
    spec = arch.layer_embeddings
    return 0 if spec is None else max(0, arch.vocab_size - spec.vocab_size) * arch.num_layers * spec.size


def stream_floats(arch: ModelArch) -> int:
    """Norms, coefficients and scales of streams; norms of embeddings of single layers."""
    floats, size = 0, arch.hidden_size
    if arch.hyper is not None:
        floats += 2 * (2 * arch.num_layers * arch.hyper.num_products + arch.hyper.count)
    if arch.gated_streams is not None:
        floats += (2 * arch.num_layers + 1) * arch.gated_streams.count * size + num_equal(arch)
    if arch.streams is not None:
        coefficients = arch.streams.count**2 + arch.streams.count**3
        floats += arch.num_layers * (3 * size + coefficients)
    if arch.layer_embeddings is not None:
        floats += arch.num_layers * size + arch.layer_embeddings.size
    return floats
