"""Multi-head latent attention: keys and values are computed from one small vector per token, which the cache stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..ops.compiled_calls import outside_graphs
from ..ops.masks.mask import Mask
from ..shapes import check_options
from ..shapes.arguments import check_counts, check_flags, check_span, whole_numbers
from .attention_mode import check_mode, current_mode, positions_for
from .checks import check_input, check_latent_call, check_latent_values, check_part, check_taken, check_vectors
from .decode.cache_protocol import ModuleCache, keys_held, positions_of, step
from .decode.fused_step import latent_step, projected
from .head_views import join_heads, split_heads
from .hooks.projections import plain_weight
from .inner_attention import Inner, InnerAttention, options_of
from .latent_costs import Choice, FormCosts, LatentForm, latent_layer, no_matrix, why_absorbed
from .multihead import Rotate
from .rotary import Positions, Rotary

RowLengths = Sequence[int] | Tensor | None
NORM_EPS = 1e-6  # eps of the norms on both latents in every published model


@runtime_checkable
class LatentCache(ModuleCache, Protocol):
    """A causal cache for `LatentAttention` with one key head of ``kv_lora_rank + rope_dim`` numbers per token.

    The values are the first kv_lora_rank columns of the keys. Members: ``lengths``, the tokens of each row;
    ``append(key, *, lengths=None)`` with key (B, 1, T, kv_lora_rank + rope_dim); and
    ``attend(query, *, mask=None, **options)``, which returns (B, H, T, kv_lora_rank) for the queries of the last T
    tokens.

    The expanded form also reads ``keys``, (B, 1, S, kv_lora_rank + rope_dim), where the first ``lengths[b]`` keys of
    row b are valid, and assumes that the cache has no mask except causality. A cache that evicts old tokens must not
    have ``keys``. Without ``keys``, the absorbed form is always used.
    """


class LatentAttention(nn.Module):
    r"""Multi-head latent attention (MLA): keys and values of all heads are computed from one latent vector per token.

    $$c_t = \text{norm}(x_t W_{DKV}), \qquad k^R_t = \text{rope}(x_t W_{KR}), \qquad
    k_t^i = [\,c_t W_{UK}^i ;\; k^R_t\,], \qquad v_t^i = c_t W_{UV}^i$$

    $$q_t^i = [\,q_t^{N,i} ;\; \text{rope}(q_t^{R,i})\,], \qquad
    \text{head}_i = \text{Attention}(Q^i, K^i, V^i), \qquad \text{out} = \text{Concat}(\text{head}_1, \dots)\, W_O$$

    Liu et al. 2024, arXiv 2405.04434. A cache stores $[c_t ; k^R_t]$, `kv_lora_rank` + `rope_dim` numbers per token,
    for any number of heads. The same function has two forms, equal up to rounding:

    - *expanded*: compute all keys and values, and attend with d_k = `nope_dim` + `rope_dim` and d_v = `value_dim`;
    - *absorbed*: as $q \cdot (c\, W_{UK}) = (q\, W_{UK}^T) \cdot c$, project the queries to the latent space and attend
      to the cached vectors: one key head for all query heads (as in MQA), d_k = `kv_lora_rank` + `rope_dim`, and the
      values are the keys' first `kv_lora_rank` columns (a view). The result is multiplied by $W_{UV}$.

    The parameters have the same names as in published checkpoints, so that these load without renaming:
    ``q_proj``, or ``q_a_proj q_a_layernorm q_b_proj`` with `q_lora_rank`; ``kv_a_proj_with_mqa``
    ($W_{DKV}$ and $W_{KR}$), ``kv_a_layernorm``, ``kv_b_proj`` (each head's $W_{UK}$, then its $W_{UV}$), ``o_proj``.

    Args:
        d_model: Width M of input and output.
        num_heads: Heads H.
        q_lora_rank: Width of the latent for queries; None projects queries directly from the input.
        kv_lora_rank: Width of the latent for keys and values.
        nope_dim: Size of the part of a query or key without position (``qk_nope_head_dim``).
        rope_dim: Size of the part with rotary position embedding, even (``qk_rope_head_dim``).
        value_dim: Size of a value (``v_head_dim``).
        bias: True if q_a_proj, kv_a_proj_with_mqa and o_proj have biases (``attention_bias``).
        rotary: A callable ``(query, key, positions) -> (query, key)`` on `rope_dim` numbers;
            ``Rotary(rope_dim, interleaved=True)`` by default. Longer contexts: `headwise.nn.yarn_frequencies`.
        scale: Factor on the scores; ``(nope_dim + rope_dim) ** -0.5`` by default. YaRN: `headwise.nn.yarn_scale`.
        dropout: Probability of dropping an attention weight in training.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1, or `rope_dim` is odd.

    Example:
        >>> import torch, headwise
        >>> mla = LatentAttention(64, 4, kv_lora_rank=16, nope_dim=8, rope_dim=4, value_dim=8)
        >>> x = torch.randn(2, 5, 64)
        >>> out = mla(x, mask=headwise.causal())
        >>> out.shape
        torch.Size([2, 5, 64])
        >>> torch.allclose(out, mla(x, mask=headwise.causal(), form="absorbed"), atol=1e-5)
        True
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        q_lora_rank: int | None = None,
        kv_lora_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        bias: bool = False,
        rotary: Rotate | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {"kv_lora_rank": kv_lora_rank, "nope_dim": nope_dim, "rope_dim": rope_dim, "value_dim": value_dim}
        self.costs = FormCosts.of(latent_layer(d_model, num_heads, q_lora_rank=q_lora_rank, **sizes))
        self.uncached: LatentForm = self.costs.cheaper(1, [0])  # for S = T the same form is cheaper at every length
        self.d_model, self.num_heads, self.q_lora_rank = d_model, num_heads, q_lora_rank
        self.kv_lora_rank, self.nope_dim, self.rope_dim, self.value_dim = kv_lora_rank, nope_dim, rope_dim, value_dim
        self.head_dim = nope_dim + rope_dim
        check_flags(bias=bias)
        check_options(None, scale, None, None, dropout)
        check_part("rotary", rotary, "a part (query, key, positions) -> (query, key), such as headwise.nn.Rotary")
        self.scale = self.head_dim**-0.5 if scale is None else scale
        if q_lora_rank is None:
            self.q_proj = nn.Linear(d_model, num_heads * self.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(d_model, q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(q_lora_rank, eps=NORM_EPS)
            self.q_b_proj = nn.Linear(q_lora_rank, num_heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d_model, kv_lora_rank + rope_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(kv_lora_rank, eps=NORM_EPS)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * (nope_dim + value_dim), bias=False)
        self.o_proj = nn.Linear(num_heads * value_dim, d_model, bias=bias)
        self.rotary = Rotary(rope_dim, interleaved=True) if rotary is None else rotary
        self.inner = InnerAttention(scale=self.scale, dropout=dropout)

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions = None,
        cache: LatentCache | None = None,
        lengths: RowLengths = None,
        form: Choice = "auto",
    ) -> Float[Tensor, "B T M"] | tuple[Float[Tensor, "B T M"], LatentCache]:
        """Attend from `x` to itself, or with a cache to the cached tokens and `x`.

        ``form="auto"`` chooses the form with fewer multiply-adds. For the last T of S tokens, *expanded* needs
        ``S H C (N + V)`` plus H (N + R + V) for each query-key pair, and *absorbed* ``T H C (N + V)`` plus H (2 C + R)
        for each pair (C, N, R, V: kv_lora_rank, nope_dim, rope_dim, value_dim). Without a cache T = S, so only the
        cost of a pair matters: the expanded form is cheaper unless kv_lora_rank is small. With a cache, the absorbed
        form is cheaper for a few tokens and the expanded form for a long prompt. For sizes 512, 128, 64, 128 and a
        long cache, the absorbed form is cheaper up to T = 170. Under torch.compile, "auto" ends the graph at a cache,
        because its lengths decide; "absorbed" does not.

        Args:
            x: (B, T, M).
            mask: The mask (`headwise.causal()`, ...); by default every key may be attended. With a cache, attention is
                causal without a mask.
            positions: Positions for the rotary embedding: (T,) or (B, T); by default they continue after the cache.
            cache: The latents of `x` are appended to it in place. It has one key head, `kv_lora_rank` + `rope_dim`
                wide, and its values are the first `kv_lora_rank` columns of its keys.
            lengths: (B,) number of real tokens among the T tokens of each row, with padding after them; only with a
                cache.
            form: "auto", "expanded" or "absorbed".

        Returns:
            (B, T, M); with a cache, the pair of that and the cache. For a fully masked row, the output is the bias of
            o_proj, or 0.

        Raises:
            TypeError: the cache lacks required methods; or the absorbed form is requested, or is the only possible one
                with this cache, and kv_b_proj is not a plain linear layer.
            ValueError: wrong shapes, an unknown form, or a cache of another size.
        """
        if cache is not None and type(self) is LatentAttention and positions is lengths is None:
            heads = latent_step(self, x, cache, mask, form)
            if heads is not None:
                return projected(self.o_proj, heads), cache
        check_input(x, self.d_model, self.kv_a_proj_with_mqa)
        check_mode(self.inner, cache)
        lengths = check_latent_call(x, cache, lengths, form, mask)
        absorbed = self._absorbs(x.shape[1], cache, form, mask=mask, lengths=lengths)
        q_nope_BHTN, q_rope_BHTR = self._queries(x)
        latent_B1TC, k_rope_B1TR = self._compress(x)
        if cache is not None and positions is None:
            positions = positions_of(cache, x.shape[1], x.device)
        places = positions_for(positions, x.shape[1], x.device)
        q_rope_BHTR, k_rope_B1TR = self.rotary(q_rope_BHTR, k_rope_B1TR, places)
        key_B1TE = self._join(latent_B1TC, k_rope_B1TR)
        if absorbed:
            query_BHTE = torch.cat((self._to_latent(q_nope_BHTN), q_rope_BHTR), dim=-1)
            if cache is None:
                mixed_BHTC = self._attend_latents(query_BHTE, key_B1TE, mask, absorbed=True)
            else:
                mixed_BHTC = self._attend_cached(cache, query_BHTE, key_B1TE, mask, lengths)
            heads_BHTV = self._from_latent(mixed_BHTC)
        else:
            query_BHTD = torch.cat((q_nope_BHTN, q_rope_BHTR), dim=-1)
            keys, rule = (key_B1TE, mask) if cache is None else keys_held(cache, key_B1TE, mask, lengths)
            heads_BHTV = self._attend_latents(query_BHTD, keys, rule, absorbed=False)
        out = self.o_proj(join_heads(heads_BHTV))
        return out if cache is None else (out, cache)

    # --- projections --------------------------------------------------------------------------------------------------

    def _queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two parts of the queries: (B, H, T, nope_dim), and (B, H, T, rope_dim) before rotation."""
        if self.q_lora_rank is None:
            projection = self.q_proj
        else:
            latent, projection = self.q_a_proj(x), self.q_b_proj
            x = self.q_a_layernorm(latent).to(latent.dtype)
        nope, rope = self._project_queries(projection, x).split((self.nope_dim, self.rope_dim), dim=-1)
        return nope, rope

    def _project_queries(self, projection: nn.Module, x: Tensor) -> Tensor:
        """Compute queries (B, H, T, D) with the projection that makes all heads."""
        return self._split_heads(projection(x), self.head_dim)

    def _split_heads(self, fused: Tensor, size: int) -> Tensor:
        """Reshape (B, T, H * size) to (B, H, T, size)."""
        return split_heads(fused, self.num_heads, size)

    def _join(self, latent: Tensor, rope: Tensor) -> Tensor:
        """Return the vectors (B, 1, T, E) that a cache stores, E = C + R, from the latents and the rotated part."""
        return torch.cat((latent, rope), dim=-1)

    def _compress(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents (B, 1, T, kv_lora_rank), and the shared part of the keys (B, 1, T, rope_dim)."""
        both = split_heads(self.kv_a_proj_with_mqa(x), 1, self.kv_lora_rank + self.rope_dim)
        latent, rope = both.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        return self.kv_a_layernorm(latent).to(latent.dtype), rope

    def expand(
        self, key: Float[Tensor, "B 1 S E"], heads: tuple[int, int] | None = None
    ) -> tuple[Float[Tensor, "B h S D"], Float[Tensor, "B h S V"]]:
        """Return keys (B, H, S, nope_dim + rope_dim), values (B, H, S, value_dim) of all heads or of `heads`."""
        check_vectors("key", key, 1, self.kv_lora_rank + self.rope_dim)
        check_taken("key", key[..., : self.kv_lora_rank], self.kv_b_proj)
        heads = None if heads is None else check_span("heads", heads, self.num_heads)
        return self._expand(key, None if heads == (0, self.num_heads) else heads)

    def _expand(self, key: Tensor, heads: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Compute `expand` without checks."""
        return self._expand_with(self._expansion_weight() if heads is None else self._up_weight(), key, heads)

    def _expand_with(
        self, weight: Tensor | None, key: Tensor, heads: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute `expand` with the rows of `weight`; if it is None, call kv_b_proj."""
        latent, rope = key.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        width = self.nope_dim + self.value_dim
        if weight is None:
            both = self._split_heads(self.kv_b_proj(latent[:, 0]), width)
            both = both if heads is None else both[:, heads[0] : heads[1]]
        else:
            rows = weight if heads is None else weight[heads[0] * width : heads[1] * width]
            both = nn.functional.linear(latent[:, 0], rows).unflatten(-1, (-1, width)).transpose(1, 2)
        nope, value = both.split((self.nope_dim, self.value_dim), dim=-1)
        return torch.cat((nope, rope.expand(-1, both.shape[1], -1, -1)), dim=-1), value

    def _expansion_weight(self) -> Tensor | None:
        """Return the weight with which all heads are expanded; None to call kv_b_proj."""
        return None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        """Call the inner part."""
        return self.inner(query, key, value, mask=mask)

    def _attend_latents(self, query: Tensor, key: Tensor, mask: Any, *, absorbed: bool) -> Tensor:
        """Attend to vectors (B, 1, S, E), or to the keys and values made of them, which a mode makes itself."""
        C, mode = self.kv_lora_rank, current_mode()
        if mode is None:
            keys = (key, key[..., :C]) if absorbed else self._expand(key)
            # Without an explicit scale the inner part would use the size of the latent key, so the query is rescaled.
            if absorbed and self._inner_options()["scale"] != self.inner.options().get("scale"):
                query = query * (query.shape[3] / self.head_dim) ** 0.5
            return self._attend(query, *keys, mask)
        options = {"mask": mask, **self._inner_options()}
        if absorbed:
            return mode.attend_expanded(query, key, lambda made, *_: (made, made[..., :C]), (), C, **options)
        if (weight := self._up_weight()) is None:  # kv_b_proj must be called for its gradients
            return mode.attend(query, *self._expand(key), **options)

        def expand(vectors: Tensor, *heads: int) -> tuple[Tensor, Tensor]:
            return self._expand_with(weight, vectors, heads)

        return mode.attend_expanded(query, key, expand, (weight,), self.value_dim, **options)

    def _to_latent(self, nope: Float[Tensor, "B H T N"]) -> Float[Tensor, "B H T C"]:
        """Project queries to the latent space: the dot product with a latent equals that with the expanded key."""
        return torch.einsum("bhtn,hnc->bhtc", nope, self.up_matrices()[0])

    def _from_latent(self, mixed: Float[Tensor, "B H T C"]) -> Float[Tensor, "B H T V"]:
        """Compute the heads from weighted sums of latents."""
        return torch.einsum("bhtc,hvc->bhtv", mixed, self.up_matrices()[1])

    def up_matrices(self) -> tuple[Float[Tensor, "H N C"], Float[Tensor, "H V C"]]:
        """Return $W_{UK}$ and $W_{UV}$ of each head, transposed as in kv_b_proj, as views."""
        weight = self._up_weight()
        if weight is None:
            raise TypeError(no_matrix(self.kv_b_proj, "the absorbed form"))
        both = weight.unflatten(0, (-1, self.nope_dim + self.value_dim))
        up_key, up_value = both.split((self.nope_dim, self.value_dim), dim=1)
        return up_key, up_value

    def _up_weight(self) -> Tensor | None:
        """Return the weight of kv_b_proj; None if it is not a plain linear layer."""
        return plain_weight(self.kv_b_proj, bias=False)

    def _inner_options(self) -> dict[str, Any]:
        """Return the options of the inner part; a default scale is that of the expanded form."""
        if not isinstance(self.inner, Inner):
            raise NotImplementedError(
                f"the absorbed form needs the scale of its inner part, and {type(self.inner).__name__} does not say "
                "what it computes; derive it from headwise.nn.Inner and define options(), or take "
                'form="expanded" without a cache'
            )
        options = self.inner.options()
        return options | {"scale": self.head_dim**-0.5} if options.get("scale") is None else options

    # --- cache --------------------------------------------------------------------------------------------------------

    def form(self, queries: int, held: Sequence[int] | None = None) -> LatentForm:
        """Return the form that "auto" chooses for a number of new tokens.

        `held` has the number of cached tokens of each row; it is None without a cache.

        Always "expanded" if kv_b_proj is not a plain linear layer (an adapter, for example), as there is no matrix to
        absorb.

        Example:
            >>> mla = LatentAttention(64, 4, kv_lora_rank=32, nope_dim=8, rope_dim=4, value_dim=8)
            >>> mla.form(5), mla.form(1, held=[100]), mla.form(50, held=[100])
            ('expanded', 'absorbed', 'expanded')
        """
        check_counts(queries=queries)
        if self._up_weight() is None:
            return "expanded"
        return self.uncached if held is None else self.costs.cheaper(queries, whole_numbers("held", held))

    def _absorbs(self, new: int, cache: LatentCache | None, form: Choice, *, mask: object, lengths: RowLengths) -> bool:
        """Return whether this call runs absorbed; raise ValueError if `form` is "expanded" and that is impossible."""
        if form == "absorbed" and self._up_weight() is None:
            raise TypeError(no_matrix(self.kv_b_proj, "the absorbed form"))
        if cache is None:
            tells = options_of(self.inner) is not None
            return (self.form(new) if form == "auto" and tells else form) == "absorbed"
        return form == "absorbed" or self._absorbs_stored(new, cache, form, mask=mask, lengths=lengths)

    @outside_graphs
    def _absorbs_stored(self, new: int, cache: LatentCache, form: Choice, *, mask: object, lengths: RowLengths) -> bool:
        """As `_absorbs`, of the latents in a cache, whose lengths a graph must not hold."""
        stored = list(cache.lengths)
        if form == "auto" and self.form(new, stored) == "absorbed":
            return True
        why = why_absorbed(cache, new, stored, masked=mask is not None, padded=lengths is not None)
        if why and self._up_weight() is None:
            raise TypeError(no_matrix(self.kv_b_proj, f"the absorbed form is the only one here ({why}), and it"))
        if why and form == "expanded":
            raise ValueError(
                f"the expanded form makes keys and values from all latents held, and {why}; "
                'form="absorbed" leaves that to the cache'
            )
        return bool(why)

    def _attend_cached(self, cache: LatentCache, query: Tensor, new: Tensor, mask: Any, lengths: Any) -> Tensor:
        """Append the new latents, and return weighted sums of the cached latents (B, H, T, C)."""
        options = {name: option for name, option in self._inner_options().items() if option is not None}
        if options.get("dropout") == 0:
            del options["dropout"]
        check_latent_values(getattr(cache, "value_dim", None), self.kv_lora_rank)
        mixed = step(
            lambda part, held, _, *, mask: held.attend(part, mask=mask, **options),
            cache, query, new, None, lengths=lengths, mask=mask,
        )  # fmt: skip
        check_latent_values(mixed.shape[-1], self.kv_lora_rank)
        return mixed

    def extra_repr(self) -> str:
        """Return the sizes."""
        low = "" if self.q_lora_rank is None else f"q_lora_rank={self.q_lora_rank}, "
        sizes = f"nope_dim={self.nope_dim}, rope_dim={self.rope_dim}, value_dim={self.value_dim}"
        return f"{self.d_model}, {self.num_heads}, {low}kv_lora_rank={self.kv_lora_rank}, {sizes}"
