"""The attention weights of one layer, head by head, in one form for all checkpoint formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ...shapes import DTYPES, check_head_counts, describe
from ...shapes.arguments import check_counts, check_flags, check_tensor, shown, whole_numbers

Norm = Literal["rms", "layer", "across"]
NORMS = ("rms", "layer", "across")
BY_QUERY_HEAD = ("query", "query_bias", "query_norm", "sinks")
BY_KV_HEAD = ("key", "key_bias", "key_norm", "value", "value_bias")


@dataclass(frozen=True)
class RotaryLayout:
    """The rotary position embedding of a head: it rotates the first `rotary_dim` of its D numbers, in pairs.

    A pair is n and n + rotary_dim / 2, or with `interleaved` 2n and 2n + 1, as in `headwise.nn.Rotary`.
    """

    rotary_dim: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_counts(2, rotary_dim=self.rotary_dim)
        check_flags(interleaved=self.interleaved)
        if self.rotary_dim % 2:
            raise ValueError(f"numbers turn in pairs, so rotary_dim is even; got {self.rotary_dim}")

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Return the indices (rotary_dim / 2,) of the first and of the second number of each pair."""
        half = self.rotary_dim // 2
        first = torch.arange(half, device="cpu")
        return (2 * first, 2 * first + 1) if self.interleaved else (first, first + half)


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """The attention weights of one layer; query head h reads key-value head ``h // (H / K)``.

    ``q_h = query[h] x + query_bias[h]``, and ``out = sum_h output[:, h] head_h + output_bias``. Keys and values may
    be computed from another input than x, with another width.

    Attributes:
        query: (H, D, M).
        key: (K, D, N).
        value: (K, V, N).
        output: (M, H, V).
        query_bias: (H, D) or None.
        key_bias: (K, D) or None.
        value_bias: (K, V) or None.
        output_bias: (M,) or None.
        sinks: (H,) or None.
        query_norm: (D,), or (H, D) with one row per head, or None: the weights of a norm of the queries.
        key_norm: (D,), or (K, D), or None.
        norm: Kind of these norms: "rms" or "layer" over each head's vector, or "across", one RMS over all heads.
        rotary: Rotary position embedding of queries and keys, after the norms; None if there is none.
        per_head: Further tensors with one row per query head, by names of the caller: slopes, a table of biases.
    """

    query: Float[Tensor, "H D M"]
    key: Float[Tensor, "K D N_key"]
    value: Float[Tensor, "K V N_value"]
    output: Float[Tensor, "M_out H V"]
    query_bias: Float[Tensor, "H D"] | None = None
    key_bias: Float[Tensor, "K D"] | None = None
    value_bias: Float[Tensor, "K V"] | None = None
    output_bias: Float[Tensor, " M_out"] | None = None
    sinks: Float[Tensor, " H"] | None = None
    query_norm: Float[Tensor, "*H D"] | None = None
    key_norm: Float[Tensor, "*K D"] | None = None
    norm: Norm = "rms"
    rotary: RotaryLayout | None = None
    per_head: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_heads(self) -> int:
        """H, the number of query heads."""
        return self.query.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """K, the number of key-value heads."""
        return self.key.shape[0]

    @property
    def group(self) -> int:
        """G = H / K, the number of query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def head_dim(self) -> int:
        """D, the size of a query or key."""
        return self.query.shape[1]

    @property
    def value_dim(self) -> int:
        """V, the size of a value."""
        return self.value.shape[1]

    def __repr__(self) -> str:
        H, K, D, V = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        return f"HeadWeights(H={H}, K={K}, D={D}, V={V}, {describe(self.query)})"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) for each tensor that is not None; those of `per_head` have their own names."""
        for entry in fields(self):
            part = getattr(self, entry.name)
            if isinstance(part, Tensor):
                yield entry.name, part
        yield from self.per_head.items()

    def map(self, change: Callable[[Tensor], Tensor]) -> HeadWeights:
        """Return the same weights with `change` applied to each tensor."""
        parts = {e.name: getattr(self, e.name) for e in fields(self)}
        changed: dict[str, Any] = {name: change(part) for name, part in parts.items() if isinstance(part, Tensor)}
        return replace(self, **changed, per_head={name: change(part) for name, part in self.per_head.items()})

    def to(self, dtype: torch.dtype) -> HeadWeights:
        """Return the same weights in another dtype."""
        return self.map(lambda part: part.to(dtype))

    def select(self, heads: Sequence[int], kv_heads: Sequence[int] | None = None) -> HeadWeights:
        """Return the weights with only these query heads, in this order.

        Args:
            heads: Indices of query heads, each at most once.
            kv_heads: Their key-value heads, in order: the first ``len(heads) / len(kv_heads)`` query heads read the
                first one, and so on. By default each query head keeps its key-value head; then `heads` must list
                equally many query heads of each, one group after the other.

        Raises:
            TypeError, ValueError: an unknown head, a head named twice, or heads that cannot be grouped like this.

        Example:
            >>> weights = HeadWeights(*(torch.randn(6, 3, 7) for _ in range(3)), torch.randn(7, 6, 3))
            >>> weights.select([4, 0, 1])
            HeadWeights(H=3, K=3, D=3, V=3, float32 (3, 3, 7) on cpu)
        """
        chosen = check_chosen("heads", heads, self.num_heads)
        shared = self._read_by(chosen) if kv_heads is None else check_chosen("kv_heads", kv_heads, self.num_kv_heads)
        check_head_counts(len(chosen), len(shared))
        q, kv = (torch.tensor(places, device=self.query.device) for places in (chosen, shared))
        parts: dict[str, Any] = {name: part[q] for name, part in self._by_head(BY_QUERY_HEAD)}
        parts |= {name: part[kv] for name, part in self._by_head(BY_KV_HEAD)}
        per_head = {name: part[q] for name, part in self.per_head.items()}
        return replace(self, **parts, output=self.output[:, q], per_head=per_head)

    def _by_head(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield those of the tensors that have a row for each head: a norm may have one row for all heads."""
        for name in names:
            part = getattr(self, name)
            if part is not None and not (name.endswith("_norm") and part.ndim == 1):
                yield name, part

    def _read_by(self, heads: list[int]) -> list[int]:
        """Return the key-value heads of these query heads, each once; raise ValueError for uneven or mixed groups."""
        read = [head // self.group for head in heads]
        shared = list(dict.fromkeys(read))
        size = len(read) // len(shared)
        if read != [kv for kv in shared for _ in range(size)]:
            raise ValueError(
                f"as many of the heads read each key-value head, one after the other; heads {heads} of groups of "
                f"{self.group} read {read}; choose equally many of each group"
            )
        return shared

    def expanded(self) -> HeadWeights:
        """Return the same layer with K = H: each key-value head is repeated for the query heads of its group."""
        repeated: dict[str, Any] = {
            name: part.repeat_interleave(self.group, 0) for name, part in self._by_head(BY_KV_HEAD)
        }
        return replace(self, **repeated)


def check_chosen(name: str, chosen: Sequence[int], count: int) -> list[int]:
    """Return indices of heads as a list of ints; raise ValueError if empty, repeated or not below `count`."""
    heads = whole_numbers(name, chosen)
    if not heads or len(set(heads)) < len(heads) or not all(0 <= head < count for head in heads):
        raise ValueError(f"{name} are some of the {count}, 0 to {count - 1}, each once; got {shown(chosen)}")
    return heads


def _check(weights: HeadWeights) -> None:
    """Check the shapes, dtypes and devices of all tensors against each other."""
    rule = "query is (H, D, M), key (K, D, N), value (K, V, N), output (M, H, V)"
    for name in ("query", "key", "value", "output"):
        part = getattr(weights, name)
        check_tensor(name, part, "a float tensor of three axes")
        if part.ndim != 3:
            raise ValueError(f"{rule}; got {name} {describe(part)}; split the heads with .unflatten")
    like = weights.query
    for name, part in weights.tensors():
        check_tensor(name, part, "a float tensor")
        if part.dtype not in DTYPES or part.dtype != like.dtype or part.device != like.device:
            raise ValueError(
                f"the weights of a layer are float tensors of one dtype and device; query is {describe(like)}, "
                f"{name} {describe(part)}; convert with .to(query.dtype)"
            )
    (H, D, _), (K, V, _) = weights.query.shape, weights.value.shape
    check_head_counts(H, K)
    forms: dict[str, list[tuple[int, ...]]] = {
        "key": [(K, D, weights.key.shape[2])],
        "output": [(weights.output.shape[0], H, V)],
        "query_bias": [(H, D)],
        "key_bias": [(K, D)],
        "value_bias": [(K, V)],
        "output_bias": [weights.output.shape[:1]],
        "sinks": [(H,)],
        "query_norm": [(D,), (H, D)],
        "key_norm": [(D,), (K, D)],
    }
    for name, allowed in forms.items():
        part = getattr(weights, name)
        if part is not None and tuple(part.shape) not in allowed:
            wanted = " or ".join(str(tuple(form)) for form in allowed)
            raise ValueError(
                f"{name} is {wanted} in a layer of H = {H}, K = {K}, D = {D}, V = {V}; got {describe(part)}"
            )
    for name, part in weights.per_head.items():
        if part.shape[:1] != (H,):
            raise ValueError(f"{name} has a row for each of the {H} query heads; got {describe(part)}")
    if weights.norm not in NORMS:
        raise ValueError(f"norm is one of {', '.join(NORMS)}; got {shown(weights.norm)}")
    if weights.rotary is not None and weights.rotary.rotary_dim > D:
        raise ValueError(f"rotary_dim is at most D = {D}; got {weights.rotary.rotary_dim}")
