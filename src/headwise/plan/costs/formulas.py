"""Parameters, cache bytes and FLOPs as plain functions of the attention shape.

One multiply-add is two floating-point operations (FLOPs), as is usual.
"""

from __future__ import annotations

from ..shape import AttentionShape, BiasOption, check_size, memory_widths, short


def parameter_counts(
    d_model: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    memory_dim: int | tuple[int, int] | None = None,
    bias: BiasOption = False,
) -> dict[str, int]:
    """Return the number of parameters of each projection with biases; arguments as in `headwise.MultiHeadAttention`.

    Raises:
        TypeError, ValueError: as in `AttentionShape.of`, or a `memory_dim` that is neither a width nor a pair.

    Example:
        >>> parameter_counts(512, 8, num_kv_heads=2)
        {'q_proj': 262144, 'k_proj': 65536, 'v_proj': 65536, 'o_proj': 262144}
    """
    shape = AttentionShape.of(
        d_model, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim, bias=bias
    )
    key_width, value_width = memory_widths(memory_dim, d_model)
    H, K, D, V = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim
    matrices = {
        "q_proj": (d_model, H * D),
        "k_proj": (key_width, K * D),
        "v_proj": (value_width, K * V),
        "o_proj": (H * V, d_model),
    }
    biased = {False: (), True: tuple(matrices), "qkv": ("q_proj", "k_proj", "v_proj")}[bias]
    return {name: m * n + (n if name in biased else 0) for name, (m, n) in matrices.items()}


def parameter_count(
    d_model: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    memory_dim: int | tuple[int, int] | None = None,
    bias: BiasOption = False,
) -> int:
    """Return the number of parameters of the four projections: 4 d_model^2 for plain multi-head attention.

    Arguments and errors are those of `parameter_counts`.

    Example:
        >>> parameter_count(512, 8) == 4 * 512**2
        True
        >>> parameter_count(512, 8) == parameter_count(512, 64)          # however d_model is split
        True
    """
    counts = parameter_counts(
        d_model,
        num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        memory_dim=memory_dim,
        bias=bias,
    )
    return sum(counts.values())


def kv_bytes_per_token(
    d_model: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    num_layers: int = 1,
    bytes_per_number: int | float = 2,
) -> int | float:
    """Return the bytes of one token in the key-value cache: ``layers * K * (D + V) * bytes_per_number``.

    Args:
        d_model: Width of the model.
        num_heads: Query heads H.
        num_kv_heads: Key-value heads K; H by default.
        head_dim: D; ``d_model / num_heads`` by default.
        value_dim: V; D by default.
        num_layers: Number of layers with a cache.
        bytes_per_number: 2 for float16 and bfloat16, 4 for float32, 0.5 for 4-bit numbers. Scales of quantised numbers
            are not counted here; `headwise.plan.of` counts those of int8.

    Returns:
        The number of bytes; an int if `bytes_per_number` is an int.

    Raises:
        TypeError, ValueError: as in `AttentionShape.of`, or a `bytes_per_number` outside (0, 1024].

    Example:
        >>> kv_bytes_per_token(4096, 32, num_layers=32), kv_bytes_per_token(4096, 32, num_kv_heads=8, num_layers=32)
        (524288, 131072)
    """
    shape = AttentionShape.of(
        d_model, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim, num_layers=num_layers
    )
    number = isinstance(bytes_per_number, (int, float)) and not isinstance(bytes_per_number, bool)
    if not number:
        raise TypeError(f"bytes_per_number is a number; got {short(bytes_per_number)}")
    if not 0 < bytes_per_number <= 1024:
        bound = "at most 1024" if bytes_per_number > 0 else "above 0"
        raise ValueError(f"bytes_per_number is {bound}; got {short(bytes_per_number)}")
    check_size("num_layers", num_layers)
    return num_layers * shape.num_kv_heads * (shape.head_dim + shape.value_dim) * bytes_per_number


def attention_flops(
    d_model: int,
    num_heads: int,
    *,
    queries: int,
    keys: int | None = None,
    batch: int = 1,
    head_dim: int | None = None,
    value_dim: int | None = None,
) -> int:
    """Return the FLOPs of scores and weighted sum without a mask, ``2 B H T S (D + V)``; projections not included.

    With ``D = V = d_model / H`` this is ``4 B T S d_model``, which does not depend on the number of heads. Sharing keys
    and values (GQA, MQA) changes the memory, not this number.

    Args:
        d_model: Width of the model.
        num_heads: Query heads H.
        queries: T.
        keys: S; T by default.
        batch: B.
        head_dim: D; ``d_model / num_heads`` by default.
        value_dim: V; D by default.

    Raises:
        TypeError, ValueError: as in `AttentionShape.of`.

    Example:
        >>> attention_flops(512, 1, queries=16) == attention_flops(512, 64, queries=16) == 4 * 16 * 16 * 512
        True
    """
    shape = AttentionShape.of(d_model, num_heads, head_dim=head_dim, value_dim=value_dim)
    keys = queries if keys is None else keys
    for name, size in (("queries", queries), ("keys", keys), ("batch", batch)):
        check_size(name, size)
    return 2 * batch * num_heads * queries * keys * (shape.head_dim + shape.value_dim)


def projection_flops(
    d_model: int,
    num_heads: int,
    *,
    tokens: int,
    memory_tokens: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    memory_dim: int | tuple[int, int] | None = None,
) -> int:
    """Return the FLOPs of the four projections: two per matrix element and token; biases are not counted.

    q_proj and o_proj process `tokens` tokens, k_proj and v_proj `memory_tokens` (`tokens` by default). The other
    arguments and the errors are those of `parameter_counts`.

    Example:
        >>> projection_flops(512, 8, tokens=16) == 2 * 16 * 4 * 512**2
        True
    """
    memory_tokens = tokens if memory_tokens is None else memory_tokens
    for name, size in (("tokens", tokens), ("memory_tokens", memory_tokens)):
        check_size(name, size)
    counts = parameter_counts(
        d_model, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim, memory_dim=memory_dim
    )
    return 2 * (tokens * (counts["q_proj"] + counts["o_proj"]) + memory_tokens * (counts["k_proj"] + counts["v_proj"]))
