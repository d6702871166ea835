"""Multi-head latent attention: keys and values are computed from one small vector per token, which the cache stores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..ops.compiled_calls import outside_graphs
from ..ops.masks.mask import Mask
from ..shapes import check_options
from ..shapes.arguments import check_counts, check_flags, check_span, whole_numbers
from .checks import check_input, check_latent_call, check_latent_values, check_part, check_taken, check_vectors
from .decode.cache_protocol import ModuleCache, cache_traits, keys_held, positions_of, step
from .decode.fused_step import latent_step, projected
from .hooks.projections import plain_weight
from .inner_attention import Inner, InnerAttention
from .latent_costs import Choice, FormCosts, LatentForm, latent_layer, no_matrix, why_absorbed
from .multihead import MultiHeadAttention, Rotate
from .rotary import Positions, Rotary
from .sharding.heads import HeadShards, dealt
from .sharding.tokens import check_splits, check_uncached, current, placed

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
        long cache, the absorbed form is cheaper up to T = 170.

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
        lengths = check_latent_call(x, cache, lengths, form, mask)
        check_uncached(cache)
        check_splits(self.inner)
        absorbed = self._absorbs(x.shape[1], cache, form, mask=mask, lengths=lengths)
        q_nope_BHTN, q_rope_BHTR = self.queries(x)
        latent_B1TC, k_rope_B1TR = self.compress(x)
        places = placed(self._places(x, cache, positions), x.shape[1], x.device)
        q_rope_BHTR, k_rope_B1TR = self.rotary(q_rope_BHTR, k_rope_B1TR, places)
        key_B1TE = torch.cat((latent_B1TC, k_rope_B1TR), dim=-1)  # E = C + R, the size of a cached vector
        if (here := self.dealt) is not None:  # each rank has all latents and computes its own heads
            key_B1TE, mask = here.group.shared(key_B1TE), here.mask(mask)
        if absorbed:
            query_BHTE = torch.cat((self.to_latent(q_nope_BHTN), q_rope_BHTR), dim=-1)
            if cache is None:
                mixed_BHTC = self._attend_all(query_BHTE, key_B1TE, mask, absorbed=True)
            else:
                mixed_BHTC = self._attend(cache, query_BHTE, key_B1TE, mask, lengths)
            heads_BHTV = self.from_latent(mixed_BHTC)
        else:
            query_BHTD = torch.cat((q_nope_BHTN, q_rope_BHTR), dim=-1)
            keys, rule = (key_B1TE, mask) if cache is None else keys_held(cache, key_B1TE, mask, lengths)
            heads_BHTV = self._attend_all(query_BHTD, keys, rule, absorbed=False)
        out = self.o_proj(MultiHeadAttention.concatenate(heads_BHTV))
        return out if cache is None else (out, cache)

    # --- projections --------------------------------------------------------------------------------------------------

    def queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two parts of the queries: (B, H, T, nope_dim), and (B, H, T, rope_dim) before rotation."""
        if self.q_lora_rank is None:
            check_input(x, self.d_model, self.q_proj)
            projection = self.q_proj
        else:
            check_input(x, self.d_model, self.q_a_proj)
            latent, projection = self.q_a_proj(x), self.q_b_proj
            x = self.q_a_layernorm(latent).to(latent.dtype)
        if (here := self.dealt) is None:
            heads_BHTD = MultiHeadAttention.split(projection(x), self.num_heads, self.head_dim)
        else:
            heads_BHTD = here.queries(projection(*here.entering(projection, x)), self.head_dim)
        nope, rope = heads_BHTD.split((self.nope_dim, self.rope_dim), dim=-1)
        return nope, rope

    def compress(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents (B, 1, T, kv_lora_rank), and the shared part of the keys (B, 1, T, rope_dim)."""
        check_input(x, self.d_model, self.kv_a_proj_with_mqa)
        both = MultiHeadAttention.split(self.kv_a_proj_with_mqa(x), 1, self.kv_lora_rank + self.rope_dim)
        latent, rope = both.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        return self.kv_a_layernorm(latent).to(latent.dtype), rope

    def expand(
        self, key: Float[Tensor, "B 1 S E"], heads: tuple[int, int] | None = None
    ) -> tuple[Float[Tensor, "B h S D"], Float[Tensor, "B h S V"]]:
        """Return keys (B, H, S, nope_dim + rope_dim), values (B, H, S, value_dim) of all heads or of `heads`."""
        check_vectors("key", key, 1, self.kv_lora_rank + self.rope_dim)
        check_taken("key", key[..., : self.kv_lora_rank], self.kv_b_proj)
        first, last = (0, self.heads_here) if heads is None else check_span("heads", heads, self.heads_here)
        if self.dealt is not None or last - first < self.num_heads:
            return self._expand(key, (first, last), self._up())
        return self._expand(key, (first, last), None)

    def _expand(self, key: Tensor, heads: tuple[int, int], weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute `expand` with the rows of `weight`; if it is None, call kv_b_proj."""
        latent, rope = key.split((self.kv_lora_rank, self.rope_dim), dim=-1)
        first, last, width = *heads, self.nope_dim + self.value_dim
        if weight is None:
            fused = self.kv_b_proj(latent[:, 0])[..., first * width : last * width]
        else:
            fused = nn.functional.linear(latent[:, 0], weight[first * width : last * width])
        both = MultiHeadAttention.split(fused, last - first, width)
        nope, value = both.split((self.nope_dim, self.value_dim), dim=-1)
        return torch.cat((nope, rope.expand(-1, last - first, -1, -1)), dim=-1), value

    def _attend_all(self, query: Tensor, key: Tensor, mask: Any, *, absorbed: bool) -> Tensor:
        """Attend to latents (B, 1, S, E), or to expanded keys and values; context parallelism sends only latents."""
        C, sharded, here = self.kv_lora_rank, current(), self.dealt
        if sharded is None:
            keys = (key, key[..., :C]) if absorbed else self.expand(key)
            # Without an explicit scale the inner part would use the size of the latent key, so the query is rescaled.
            if absorbed and self._inner_options()["scale"] != self.inner.options().get("scale"):
                query = query * (query.shape[3] / self.head_dim) ** 0.5
            inner = self.inner if here is None else partial(here.call, self.inner)
            return inner(query, *keys, mask=mask)
        options = {"mask": mask, **self._inner_options()}
        if here is not None:
            sinks = options.get("sinks")
            options |= {"some": here.some, "sinks": None if sinks is None else here.parameter(sinks)}
        if absorbed:
            return sharded.attend_made(query, key, lambda made, *_: (made, made[..., :C]), (), C, **options)
        if (weight := self._up()) is None:  # kv_b_proj must be called for its gradients, so keys and values are sent
            return sharded.attend(query, *self.expand(key), **options)
        return sharded.attend_made(
            query, key, lambda made, *heads: self._expand(made, heads, weight), (weight,), self.value_dim, **options
        )

    def to_latent(self, nope: Float[Tensor, "B H T N"]) -> Float[Tensor, "B H T C"]:
        """Project queries to the latent space: the dot product with a latent equals that with the expanded key."""
        check_vectors("nope", nope, self.heads_here, self.nope_dim)
        check_taken("nope", nope, self.kv_b_proj)
        return torch.einsum("bhtn,hnc->bhtc", nope, self.up_matrices()[0])

    def from_latent(self, mixed: Float[Tensor, "B H T C"]) -> Float[Tensor, "B H T V"]:
        """Compute the heads from weighted sums of latents."""
        check_vectors("mixed", mixed, self.heads_here, self.kv_lora_rank)
        check_taken("mixed", mixed, self.kv_b_proj)
        return torch.einsum("bhtc,hvc->bhtv", mixed, self.up_matrices()[1])

    def up_matrices(self) -> tuple[Float[Tensor, "H N C"], Float[Tensor, "H V C"]]:
        """Return $W_{UK}$ and $W_{UV}$ of each head, transposed as in kv_b_proj, as views."""
        weight = self._up()
        if weight is None:
            raise TypeError(no_matrix(self.kv_b_proj, "the absorbed form"))
        both = weight.unflatten(0, (self.heads_here, -1))
        up_key, up_value = both.split((self.nope_dim, self.value_dim), dim=1)
        return up_key, up_value

    @property
    def dealt(self) -> HeadShards | None:
        """The heads of this rank if the heads are split over ranks; None if this rank has all heads."""
        return dealt(self, self.kv_b_proj)

    @property
    def heads_here(self) -> int:
        """The number of heads that this rank computes."""
        return self.num_heads if (here := self.dealt) is None else here.share.count

    def _up(self) -> Tensor | None:
        """Return the part of kv_b_proj's weight for the heads of this rank; None if kv_b_proj is not plain linear."""
        here = self.dealt
        return plain_weight(self.kv_b_proj, bias=False) if here is None else here.weight(self.kv_b_proj)

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

    def _tells(self) -> bool:
        """Return whether the inner part defines its options."""
        try:
            return bool(self._inner_options())
        except NotImplementedError:
            return False

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
        if self._up() is None:
            return "expanded"
        return self.uncached if held is None else self.costs.cheaper(queries, whole_numbers("held", held))

    def _absorbs(self, new: int, cache: LatentCache | None, form: Choice, *, mask: object, lengths: RowLengths) -> bool:
        """Return whether this call runs absorbed; raise ValueError if `form` is "expanded" and that is impossible."""
        if form == "absorbed" and self._up() is None:
            raise TypeError(no_matrix(self.kv_b_proj, "the absorbed form"))
        if cache is None:
            return (self.form(new) if form == "auto" and self._tells() else form) == "absorbed"
        return self._absorbs_stored(new, cache, form, mask=mask, lengths=lengths)

    @outside_graphs
    def _absorbs_stored(self, new: int, cache: LatentCache, form: Choice, *, mask: object, lengths: RowLengths) -> bool:
        """As `_absorbs`, of the latents in a cache, whose lengths a graph must not hold."""
        stored = list(cache.lengths)
        if (self.form(new, stored) if form == "auto" else form) == "absorbed":
            return True
        why = why_absorbed(cache, new, stored, masked=mask is not None, padded=lengths is not None)
        if why and self._up() is None:
            raise TypeError(no_matrix(self.kv_b_proj, f"the absorbed form is the only one here ({why}), and it"))
        if why and form == "expanded":
            raise ValueError(
                f"the expanded form makes keys and values from all latents held, and {why}; "
                'form="absorbed" leaves that to the cache'
            )
        return bool(why)

    @staticmethod
    def _places(x: Tensor, cache: LatentCache | None, positions: Positions) -> Positions:
        """Return the positions of the call; by default they continue after the tokens in the cache."""
        if cache is None or positions is not None:
            return positions
        return positions_of(cache, x.shape[1], x.device)

    def _attend(self, cache: LatentCache, query: Tensor, new: Tensor, mask: Any, lengths: Any) -> Tensor:
        """Append the new latents, and return weighted sums of the cached latents (B, H, T, C)."""
        options = {name: option for name, option in self._inner_options().items() if option is not None}
        if options.get("dropout") == 0:
            del options["dropout"]
        if (here := self.dealt) is not None and "sinks" in options:
            options["sinks"] = here.parameter(options["sinks"])
        check_latent_values(cache_traits(cache).value_dim, self.kv_lora_rank)
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
