"""Single heads: as views of fused tensors and of the matrices of fused projections, and the conversion back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..shapes import DTYPES, check_head_counts, describe
from ..shapes.arguments import check_counts, check_tensor, shown
from .checks import check_vectors, check_width
from .hooks.projections import weight_of


@dataclass(frozen=True, eq=False)
class Head:
    """The matrices of one head: ``head = Attention(x W_Q, m W_K, m W_V)``, and ``head W_O`` is added to the output.

    Matrices are oriented for ``x @ W_Q``, as in Vaswani et al. 2017, "Attention Is All You Need", arXiv 1706.03762,
    section 3.2.2. `m` is the memory (`x` itself in self-attention), of width N.

    Attributes:
        W_Q: (M, D).
        W_K: (N, D).
        W_V: (N, V).
        W_O: (V, M).
        b_Q: (D,) or None; added to ``x W_Q``.
        b_K: (D,) or None.
        b_V: (V,) or None.
    """

    W_Q: Float[Tensor, "M D"]
    W_K: Float[Tensor, "N_key D"]
    W_V: Float[Tensor, "N_value V"]
    W_O: Float[Tensor, "V M"]
    b_Q: Float[Tensor, " D"] | None = None
    b_K: Float[Tensor, " D"] | None = None
    b_V: Float[Tensor, " V"] | None = None

    def __repr__(self) -> str:
        sizes = (f"{n}={tuple(t.shape)}" for n, t in vars(self).items() if t is not None)
        return f"Head({', '.join(sizes)})"


def split_heads(fused: Tensor, heads: int, size: int) -> Tensor:
    """Reshape the output (B, T, heads * size) of a projection to (B, heads, T, size), as a view.

    Raises:
        ValueError: the projection gives another number of columns.
    """
    check_width(fused, heads, size)
    return fused.unflatten(-1, (heads, size)).transpose(1, 2)


def join_heads(heads_BHTV: Tensor) -> Tensor:
    """Reshape (B, H, T, V) to (B, T, H * V); head h has columns h * V to (h + 1) * V - 1.

    Raises:
        TypeError, ValueError: the inner part did not return a float tensor (B, H, T, V).
    """
    check_vectors("what the inner part gives", heads_BHTV)
    return heads_BHTV.transpose(1, 2).flatten(2)


def rows_of(name: str, projection: nn.Module, index: int, size: int) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of head `index` in a fused projection, as views for ``x @ W + b``."""
    rows, weight = slice(index * size, (index + 1) * size), weight_of(name, projection, "head()")
    bias: Any = projection.bias
    return weight[rows].T, None if bias is None else bias[rows]


def check_heads(source: Any, num_kv_heads: int | None, output_bias: Any) -> tuple[list[Head], int]:
    """Check that heads can be fused, and return them with the number of key-value heads.

    Raises:
        TypeError: an item is not a `Head`.
        ValueError: no heads, unequal shapes, or a group whose heads do not share W_K and W_V.
    """
    if isinstance(source, (str, bytes, Mapping, Tensor)) or not isinstance(source, Iterable):
        raise TypeError(f"from_heads takes a list of headwise.nn.Head objects; got {shown(source)}")
    heads: list[Head] = list(source)
    num_kv_heads = len(heads) if num_kv_heads is None else num_kv_heads
    if not heads:
        raise ValueError("from_heads needs at least one Head; got none")
    check_counts(1, num_kv_heads=num_kv_heads)
    for n, head in enumerate(heads):
        if not isinstance(head, Head):
            raise TypeError(f"from_heads takes headwise.nn.Head objects; item {n} is {type(head).__name__}")
        _check_matrices(n, head, heads[0])
        if repr(head) != repr(heads[0]):
            raise ValueError(
                f"heads of one module have equal shapes and biases; head 0 is {heads[0]}, head {n} is {head}"
            )
    sizes = heads[0]
    D, V = sizes.W_Q.shape[1], sizes.W_V.shape[1]
    biases = [bias is None or bias.shape == (n,) for bias, n in ((sizes.b_Q, D), (sizes.b_K, D), (sizes.b_V, V))]
    if sizes.W_K.shape[1] != D or sizes.W_O.shape != (V, sizes.W_Q.shape[0]) or not all(biases):
        raise ValueError(f"a head has W_Q (M, D), W_K (N, D), W_V (N, V), W_O (V, M), biases (D,), (V,); got {sizes}")
    check_head_counts(len(heads), num_kv_heads)
    group = len(heads) // num_kv_heads
    for n, head in enumerate(heads):
        first = heads[n // group * group]
        if not (_same(head.W_K, first.W_K) and _same(head.W_V, first.W_V)):
            raise ValueError(
                f"with {len(heads)} heads and num_kv_heads = {num_kv_heads}, heads {n // group * group} to "
                f"{n // group * group + group - 1} share W_K and W_V, but head {n} differs from the first; "
                "leave num_kv_heads out to give each head its own"
            )
        if not (_same(head.b_K, first.b_K) and _same(head.b_V, first.b_V)):
            raise ValueError(
                f"heads that share W_K and W_V share b_K and b_V too; head {n} differs from its group's first"
            )
    width = sizes.W_O.shape[1]
    if output_bias is not None:
        check_tensor("output_bias", output_bias, f"a float tensor ({width},)")
        like = sizes.W_O
        if output_bias.shape != (width,) or (output_bias.dtype, output_bias.device) != (like.dtype, like.device):
            raise ValueError(
                f"output_bias is ({width},), of the heads' dtype and device; got {describe(output_bias)}, W_O "
                f"{describe(like)}"
            )
    return heads, num_kv_heads


def _check_matrices(n: int, head: Head, first: Head) -> None:
    """Check that a head has float matrices and vectors, with the dtype and device of the first head."""
    like = first.W_Q
    for name, x in vars(head).items():
        axes = 1 if name.startswith("b") else 2
        if x is None and axes == 1:
            continue
        rule = f"a float tensor of {axes} {'axis' if axes == 1 else 'axes'}, alike in dtype and device in all heads"
        check_tensor(f"{name} of head {n}", x, rule)
        if x.ndim != axes or x.dtype not in DTYPES or x.dtype != like.dtype or x.device != like.device:
            raise ValueError(f"{name} of head {n} is {rule}; got {describe(x)}, W_Q of head 0 {describe(like)}")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors are exactly equal; an object is not compared with itself."""
    if one is None or other is None:
        return one is other
    return one is other or torch.equal(one, other)


@torch.no_grad()
def fill_heads(mha: Any, heads: Sequence[Head], output_bias: Tensor | None) -> None:
    """Copy the numbers of `heads` into a module of the right sizes; K and V come from the first head of each group."""
    like = heads[0].W_Q
    mha.to(device=like.device, dtype=like.dtype)
    owners = heads[:: len(heads) // mha.num_kv_heads]
    mha.q_proj.weight.copy_(torch.cat([head.W_Q.T for head in heads]))
    mha.k_proj.weight.copy_(torch.cat([head.W_K.T for head in owners]))
    mha.v_proj.weight.copy_(torch.cat([head.W_V.T for head in owners]))
    mha.o_proj.weight.copy_(torch.cat([head.W_O for head in heads]).T)
    for projection, biases in (
        (mha.q_proj, [head.b_Q for head in heads]),
        (mha.k_proj, [head.b_K for head in owners]),
        (mha.v_proj, [head.b_V for head in owners]),
        (mha.o_proj, [output_bias]),
    ):
        if projection.bias is not None and biases[0] is not None:
            projection.bias.copy_(torch.cat([bias for bias in biases if bias is not None]))
        elif projection.bias is not None:
            projection.bias.zero_()  # these heads have no such bias
