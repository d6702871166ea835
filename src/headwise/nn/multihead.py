"""Multi-head attention: one projection for all heads, attention in each head, and the output projection W_O."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from ..ops.masks.mask import Mask, as_mask
from ..plan.shape import BiasOption
from ..shapes.arguments import check_counts
from .attention_mode import check_mode, positions_for
from .checks import check_cache, check_input, check_memory, check_norm, check_part, check_sizes
from .decode.cache_protocol import ModuleCache, is_causal, positions_of, step
from .decode.fused_step import multihead_step, projected
from .head_views import Head, check_heads, fill_heads, join_heads, rows_of, split_heads
from .hooks.projections import weight_of
from .inner_attention import as_inner
from .rotary import Positions
from .torch_module_keywords import refuse_inputs, refuse_options

Rotate = Callable[[Tensor, Tensor, Positions], tuple[Tensor, Tensor]]
Memory = Float[Tensor, "B S N"] | tuple[Float[Tensor, "B S N_key"], Float[Tensor, "B S N_value"]]


class MultiHeadAttention(nn.Module):
    r"""Multi-head attention (MHA), grouped-query attention (GQA) and multi-query attention (MQA).

    $$\text{MultiHead}(X) = \text{Concat}(\text{head}_1, \dots, \text{head}_h)\, W_O, \qquad
    \text{head}_i = \text{Attention}(X W_Q^i, X W_K^i, X W_V^i)$$

    $$\text{Attention}(Q, K, V) = \text{softmax}(Q K^T / \sqrt{d_k})\, V, \qquad d_k = d_{\text{model}} / h$$

    MHA: Vaswani et al. 2017, arXiv 1706.03762. MQA: Shazeer 2019, arXiv 1911.02150. GQA: Ainslie et al. 2023, arXiv
    2305.13245. The projections of all heads are fused: q_proj, k_proj, v_proj, o_proj are `torch.nn.Linear` with its
    default initialization; `head` returns the matrices of one head. Query head i uses key-value head ``i // (H / K)``.

    Parts that differ between models are passed as modules: `rotary` (positions), `qk_norm`, `inner` (the attention).

    Args:
        d_model: Width M of input and output.
        num_heads: Query heads H.
        num_kv_heads: Key-value heads K, a divisor of H; H by default (MHA), 1 is MQA.
        head_dim: Size D of a query or key; ``d_model / num_heads`` by default.
        value_dim: Size V of a value; `head_dim` by default.
        memory_dim: Width of the memory in cross-attention, or a pair of widths (for keys, for values). If it is set, a
            memory is required; otherwise a memory of width `d_model` is optional.
        bias: False, True (all four projections), or ``"qkv"`` (all but o_proj).
        rotary: A callable ``(query, key, positions) -> (query, key)``, such as `headwise.nn.Rotary`.
        qk_norm: A factory ``head_dim -> module``, such as ``torch.nn.RMSNorm``, for q_norm and k_norm over each head.
        inner: A callable ``(query, key, value, *, mask) -> out``; by default `headwise.nn.InnerAttention()`. Also
            ``functools.partial(headwise.attention, softcap=50.0)``.

    Raises:
        TypeError: a size is not an int, the inner part is not callable, or an option is unknown.
        ValueError: sizes are not divisible, or `bias` is unknown.

    Example:
        >>> import torch, headwise
        >>> mha = MultiHeadAttention(12, 6, num_kv_heads=2, bias="qkv")
        >>> x = torch.randn(2, 5, 12)
        >>> mha(x, mask=headwise.causal()).shape                          # shape in equals shape out
        torch.Size([2, 5, 12])
        >>> cross = MultiHeadAttention(12, 3, memory_dim=7)
        >>> cross(x, memory=torch.randn(2, 11, 7)).shape
        torch.Size([2, 5, 12])
    """

    takes_steps = True  # of this class alone: a derived class may compute something else

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        memory_dim: int | tuple[int, int] | None = None,
        bias: BiasOption = False,
        rotary: Rotate | None = None,
        qk_norm: Callable[[int], nn.Module] | None = None,
        inner: Callable[..., Tensor] | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        refuse_options(others)
        shape, self.memory_widths = check_sizes(
            memory_dim, d_model, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, value_dim=value_dim, bias=bias
        )
        self.d_model, self.num_heads, self.num_kv_heads = d_model, num_heads, shape.num_kv_heads
        self.head_dim, self.value_dim, self.memory_dim = shape.head_dim, shape.value_dim, memory_dim
        key_width, value_width = self.memory_widths
        self.q_proj = nn.Linear(d_model, num_heads * self.head_dim, bias=bool(bias))
        self.k_proj = nn.Linear(key_width, self.num_kv_heads * self.head_dim, bias=bool(bias))
        self.v_proj = nn.Linear(value_width, self.num_kv_heads * self.value_dim, bias=bool(bias))
        self.o_proj = nn.Linear(num_heads * self.value_dim, d_model, bias=bias is True)
        check_norm(qk_norm)
        check_part("rotary", rotary, "a part (query, key, positions) -> (query, key), such as headwise.nn.Rotary")
        self.q_norm = None if qk_norm is None else qk_norm(self.head_dim)
        self.k_norm = None if qk_norm is None else qk_norm(self.head_dim)
        self.rotary = rotary
        self.inner = as_inner(inner)

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        memory: Memory | None = None,
        *more: Any,
        mask: Mask | Tensor | None = None,
        positions: Positions = None,
        gate: Float[Tensor, "..."] | None = None,
        cache: ModuleCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        **others: Any,
    ) -> Float[Tensor, "B T M"] | tuple[Float[Tensor, "B T M"], ModuleCache]:
        """Attend from `x` to `memory`, or to `x` itself, or with a cache to all cached tokens and `x`.

        Args:
            x: (B, T, M).
            memory: (B, S, N) for keys and values, or a pair of such tensors, one for each; `x` by default.
            *more: Refused with a TypeError that names the right call.
            mask: The mask (`headwise.causal()`, a bool tensor with True = attend, ...); by default every key may be
                attended. With a causal cache, attention is causal without a mask.
            positions: Positions for the rotary embedding: (T,) or (B, T), or a pair of those for queries and keys. By
                default they continue after the tokens in the cache.
            gate: Factor on the heads before W_O: (H,), (B, H), (B, H, T) or (B, H, T, V); 0 disables a head.
            cache: A cache of `headwise.cache`, to which the keys and values of `x` are appended. If it is not causal,
                those of the memory are appended in the first call, and later calls need no memory.
            lengths: (B,) number of real tokens among the T tokens of each row, with padding after them; only with a
                cache.
            **others: Refused with a TypeError that names the right keyword.

        Returns:
            (B, T, M); with a cache, the pair of that and the cache. For a fully masked row, the output is the bias of
            o_proj, or 0.

        Raises:
            ValueError: wrong shapes, a missing memory, or positions without a rotary part.
        """
        if more or others:
            refuse_inputs(more, others)
        plain = all(option is None for option in (memory, positions, lengths))
        if cache is not None and plain and "takes_steps" in type(self).__dict__:
            heads = multihead_step(self, x, cache, mask, gate)
            if heads is not None:
                return projected(self.o_proj, heads), cache
        check_input(x, self.d_model, self.q_proj)
        check_mode(self.inner, cache)
        lengths = check_cache(x, cache, lengths)
        gate = self._gate(x, gate)
        if cache is not None:
            heads_BHTV = self._cached(x, memory, cache, mask=mask, positions=positions, gate=gate, lengths=lengths)
            return self.o_proj(join_heads(heads_BHTV)), cache
        q_BHTD, k_BKSD, v_BKSV = self._project(x, *self._sources(x, memory))
        q_BHTD, k_BKSD = self._normalize(q_BHTD, k_BKSD)
        q_BHTD, k_BKSD = self._rotate(q_BHTD, k_BKSD, positions)
        heads_BHTV = self._attend(q_BHTD, k_BKSD, v_BKSV, mask=mask, **({} if gate is None else {"gate": gate}))
        return self.o_proj(join_heads(heads_BHTV))

    def _cached(
        self,
        x: Tensor,
        memory: Memory | None,
        cache: ModuleCache,
        *,
        positions: Positions,
        lengths: Any,
        **options: Any,
    ) -> Tensor:
        """Compute the heads of `x` (B, H, T, V) over all tokens in the cache, including those of `x`."""
        as_mask(options["mask"])  # check before the cache changes
        causal = is_causal(cache)
        if not causal and any(cache.lengths):  # the cache already has the memory
            if memory is not None:
                raise ValueError("this cache holds its memory already; leave memory out, or take a fresh cache")
            query = self._project_queries(x)
            query, _ = self._normalize(query, query[:, :0])
            of_queries = positions[0] if isinstance(positions, tuple) and positions else positions
            query, _ = self._rotate(query, query[:, :0], of_queries)
            return step(self._attend, cache, query, None, None, **options)
        query, key, value = self._project(x, *self._sources(x, memory))
        if self.rotary is not None and positions is None and causal:
            positions = positions_of(cache, x.shape[1], x.device)
        query, key = self._normalize(query, key)
        query, key = self._rotate(query, key, positions)
        return step(self._attend, cache, query, key, value, lengths=lengths, **options)

    def _project(self, x: Tensor, for_keys: Tensor, for_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries (B, H, T, D), keys (B, K, S, D) and values (B, K, S, V)."""
        key = split_heads(self.k_proj(for_keys), self.num_kv_heads, self.head_dim)
        value = split_heads(self.v_proj(for_values), self.num_kv_heads, self.value_dim)
        return self._project_queries(x), key, value

    def _project_queries(self, x: Tensor) -> Tensor:
        """Compute queries (B, H, T, D)."""
        return split_heads(self.q_proj(x), self.num_heads, self.head_dim)

    def _gate(self, x: Tensor, gate: Tensor | None) -> Tensor | None:
        """Return the factor on the heads of `x`: the gate of the call. Classes with a gate of their own override it."""
        return gate

    def _attend(self, query: Tensor, key: Any, value: Tensor | None, **options: Any) -> Tensor:
        """Call the inner part with a mask, and a gate if there is one."""
        return self.inner(query, key, value, **options)

    def _sources(self, x: Tensor, memory: Memory | None) -> tuple[Tensor, Tensor]:
        """Return the inputs of the key and value projections, (B, S, N) each."""
        required = self.memory_dim is not None
        return check_memory(x, memory, self.memory_widths, (self.k_proj, self.v_proj), required=required)

    def _normalize(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Apply q_norm and k_norm over the last axis if the module has them, without changing the dtype."""
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query).to(query.dtype), self.k_norm(key).to(key.dtype)

    def _rotate(self, query: Tensor, key: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Apply the rotary part if the module has one."""
        if self.rotary is not None:
            return self.rotary(query, key, positions_for(positions, query.shape[2], query.device))
        if positions is not None:
            raise ValueError(
                "positions are for the rotary part and this module has none; build it with "
                "rotary=headwise.nn.Rotary(head_dim), or leave positions out"
            )
        return query, key

    def head(self, index: int) -> Head:
        """Return the matrices of head `index` as views: in-place changes also change the module.

        Heads of one group (GQA, MQA) have the same W_K and W_V. The bias of o_proj belongs to no head. The matrices of
        a parametrized projection (`torch.nn.utils.parametrize`) are computed and are not views.

        Raises:
            TypeError, ValueError: there is no such head; or a projection is not a plain linear layer (an adapter,
                hooks, a quantised layer), so that its weight alone does not determine its output.

        Example:
            >>> import torch
            >>> mha, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
            >>> attend = lambda Q, K, V: torch.softmax(Q @ K.mT / 4**0.5, dim=-1) @ V
            >>> heads = [mha.head(i) for i in range(3)]
            >>> small = sum(attend(x @ h.W_Q, x @ h.W_K, x @ h.W_V) @ h.W_O for h in heads)
            >>> torch.allclose(small, mha(x), atol=1e-6)
            True
        """
        check_counts(index=index)
        if index >= self.num_heads:
            raise ValueError(f"head index must be 0 to {self.num_heads - 1}; got {index}")
        kv = index // (self.num_heads // self.num_kv_heads)
        W_Q, b_Q = rows_of("q_proj", self.q_proj, index, self.head_dim)
        W_K, b_K = rows_of("k_proj", self.k_proj, kv, self.head_dim)
        W_V, b_V = rows_of("v_proj", self.v_proj, kv, self.value_dim)
        mixing = weight_of("o_proj", self.o_proj, "head()")
        W_O = mixing[:, index * self.value_dim : (index + 1) * self.value_dim].T
        return Head(W_Q, W_K, W_V, W_O, b_Q, b_K, b_V)

    @classmethod
    def from_heads(
        cls, heads: Sequence[Head], *, num_kv_heads: int | None = None, output_bias: Tensor | None = None, **parts: Any
    ) -> "MultiHeadAttention":
        """Build a module from single heads; their numbers are copied.

        Args:
            heads: One `Head` per query head, all of equal shapes.
            num_kv_heads: Key-value heads K. If K < H, every H/K consecutive heads must have equal W_K and W_V, which
                are stored once. By default K = H, which is always possible but needs more memory.
            output_bias: (M,) bias of o_proj.
            **parts: `rotary`, `qk_norm`, `inner`, as for the class. Norms made by `qk_norm` are newly initialized.

        Raises:
            TypeError: an item is not a `Head`.
            ValueError: unequal shapes, or a group whose heads do not share W_K and W_V.

        Example:
            >>> mha = MultiHeadAttention(12, 6, num_kv_heads=2)
            >>> pruned = MultiHeadAttention.from_heads([mha.head(h) for h in (0, 1, 4, 5)], num_kv_heads=2)
            >>> pruned.q_proj.weight.shape
            torch.Size([8, 12])
        """
        heads, num_kv_heads = check_heads(heads, num_kv_heads, output_bias)
        first = heads[0]
        d_model, head_dim = first.W_Q.shape
        widths = (first.W_K.shape[0], first.W_V.shape[0])
        biased = any(bias is not None for bias in (first.b_Q, first.b_K, first.b_V))
        mha = cls(
            d_model,
            len(heads),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=first.W_O.shape[0],
            memory_dim=None if widths == (d_model, d_model) else widths,
            bias=True if output_bias is not None else "qkv" if biased else False,
            **parts,
        )
        fill_heads(mha, heads, output_bias)
        return mha

    def extra_repr(self) -> str:
        """Return the sizes."""
        sizes = f"{self.d_model}, {self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        sizes += "" if self.value_dim == self.head_dim else f", value_dim={self.value_dim}"
        return sizes + ("" if self.memory_dim is None else f", memory_dim={self.memory_dim}")
