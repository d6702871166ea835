"""One attention layer: its sizes, the parameters of its projections, its cache, and the keys of each query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..costs.mask_pairs import mask_pairs
from .parts import Part, linear, macs, parameters, vector
from .sparse import Compressor, Indexer, SharedKey

LayerRole = Literal["self", "cross", "encoder"]
QkNorm = Literal["", "head", "each", "all"]
STREAMS = {"self": ("decoder", "decoder"), "encoder": ("encoder", "encoder"), "cross": ("decoder", "memory")}
"""The stream of tokens for q_proj and o_proj, and that for k_proj and v_proj, by role."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: queries, keys and values are computed from small shared vectors.

    Attributes:
        kv_rank: Width of the latent for keys and values; it is cached, together with the rotary part.
        rope_dim: Width of the rotary part of a key, shared by all heads.
        q_rank: Width of the latent for queries; None if queries are computed directly from the input.
        bias: True if the two down-projections have biases.
    """

    kv_rank: int
    rope_dim: int
    q_rank: int | None = None
    bias: bool = False


@dataclass(frozen=True)
class PositionTerms:
    """The content-position terms of the scores in disentangled attention.

    Attributes:
        rows: The number of distances with a vector; larger distances are clipped.
        keys: True if queries are multiplied by position keys.
        queries: True if keys are multiplied by position queries.
        shared: True if q_proj and k_proj compute them, so they have no matrices of their own.
        key_bias: True if the matrix of position keys has a bias; that of position queries always has one.
        grows: True if a pass computes only the distances that occur in its text.
    """

    rows: int
    keys: bool
    queries: bool
    shared: bool = False
    key_bias: bool = True
    grows: bool = False

    def met(self, tokens: int) -> int:
        """Return the number of distances that a pass over `tokens` tokens computes."""
        return min(self.rows, 2 * tokens) if self.grows else self.rows

    def made(self) -> int:
        """Return the number of matrices that the distances are multiplied by."""
        return 2 if self.shared else self.keys + self.queries


@dataclass(frozen=True)
class Biases:
    """The projections that have a bias."""

    q: bool = False
    k: bool = False
    v: bool = False
    o: bool = False


@dataclass(frozen=True)
class AttentionLayer:
    """The sizes of one attention layer; all its costs are functions of them.

    Attributes:
        role: ``self`` (causal, cached), ``cross`` (to an encoder's output, cached), ``encoder`` (bidirectional).
        index: Index of the layer in its stack.
        d_model: Width of the residual stream.
        num_heads: Query heads H.
        num_kv_heads: Key-value heads K.
        head_dim: D, of queries and keys.
        value_dim: V.
        window: Keys that a query attends to, including its own; None for all that the role allows.
        chunked: True if the window is a chunk with fixed ends, in which a query attends to earlier keys.
        bias: The projections that have a bias.
        qk_norm: Norms of queries and keys: D numbers shared by all heads (``head``), D for each head (``each``), or one
            norm over all heads together (``all``).
        qk_norm_bias: True if those norms have biases.
        sinks: True if each head has a learned sink.
        gated: True if q_proj also computes a gate for the outputs of the heads.
        positions: The content-position terms, or None.
        out_width: Input width of o_proj if it is not H * V.
        sub_norm: Parameters of a norm before o_proj.
        latent: The ranks of latent attention, or None.
        shared: True if the weights belong to another layer and are not counted here.
        indexer: The indexer that chooses the keys of each query, or None.
        keys_as_values: True if the output of k_proj also makes the values, so there is no v_proj.
        keys_of: Index of the earlier layer whose cached keys and values this layer reads; it makes and caches none.
        shared_key: The one key of a token that is also its value, with compressed keys beside the window, or None.
    """

    role: LayerRole
    index: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False
    bias: Biases = Biases()
    qk_norm: QkNorm = ""
    qk_norm_bias: bool = False
    sinks: bool = False
    gated: bool = False
    positions: PositionTerms | None = None
    out_width: int | None = None
    sub_norm: int = 0
    latent: Latent | None = None
    shared: bool = False
    indexer: Indexer | None = None
    keys_as_values: bool = False
    keys_of: int | None = None
    shared_key: SharedKey | None = None

    @property
    def kind(self) -> str:
        """The kind of attention: MHA, GQA, MQA or MLA.

        Example:
            >>> AttentionLayer("self", 0, 4096, 32, 8, 128, 128).kind
            'GQA'
        """
        if self.latent is not None:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    def parts(self) -> tuple[Part, ...]:
        """Return every matrix and vector: ``q_proj k_proj v_proj o_proj``, norms, and ``kv_down`` if latent."""
        return self._parts

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        if self.shared_key is not None:
            parts = self.shared_key.parts(self.d_model, self.num_heads, self.head_dim)
        else:
            parts = self._latent_parts(self.latent) if self.latent is not None else self._plain_parts()
        if not self.shared:
            return tuple(parts)
        return tuple(replace(part, parameters=0) for part in parts)

    def _plain_parts(self) -> Iterator[Part]:
        H, K, D, V, width = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim, self.d_model
        query, key = STREAMS[self.role]
        gate = H * V if self.gated else 0
        yield linear("q_proj", "attention", width, H * D + gate, bias=self.bias.q, stream=query)
        if self.keys_of is None:
            yield linear("k_proj", "attention", width, K * D, bias=self.bias.k, stream=key)
        if self.keys_of is None and not self.keys_as_values:
            yield linear("v_proj", "attention", width, K * V, bias=self.bias.v, stream=key)
        out = H * V if self.out_width is None else self.out_width
        yield linear("o_proj", "attention", out, width, bias=self.bias.o, stream=query)
        own_keys = self.keys_of is None
        numbers = {"": 0, "head": (1 + own_keys) * D, "each": (H + K) * D, "all": (H + K) * D}[self.qk_norm]
        if numbers:
            yield vector("qk_norm", "attention", numbers * (2 if self.qk_norm_bias else 1), stream=query)
        if self.sinks:
            yield vector("sinks", "attention", H, stream=query)
        if self.sub_norm:
            yield vector("sub_norm", "attention", self.sub_norm, stream=query)
        if self.positions is not None and not self.positions.shared:  # used once per pass, not once per token
            if self.positions.keys:
                bias = H * D if self.positions.key_bias else 0
                yield vector("pos_key_proj", "attention", width * H * D + bias, stream=query)
            if self.positions.queries:
                yield vector("pos_query_proj", "attention", width * H * D + H * D, stream=query)

    def _latent_parts(self, latent: Latent) -> Iterator[Part]:
        H, D, V, width = self.num_heads, self.head_dim, self.value_dim, self.d_model
        if latent.q_rank is None:
            yield linear("q_proj", "attention", width, H * D)
        else:
            yield linear("q_down", "attention", width, latent.q_rank, bias=latent.bias)
            yield vector("q_norm", "attention", latent.q_rank)
            yield linear("q_proj", "attention", latent.q_rank, H * D)
        yield linear("kv_down", "attention", width, latent.kv_rank + latent.rope_dim, bias=latent.bias)
        yield vector("kv_norm", "attention", latent.kv_rank)
        yield linear("k_proj", "attention", latent.kv_rank, H * (D - latent.rope_dim))
        yield linear("v_proj", "attention", latent.kv_rank, H * V)
        yield linear("o_proj", "attention", H * V, width, bias=self.bias.o)
        if self.indexer is not None:
            assert latent.q_rank is not None
            yield from self.indexer.parts(width, latent.q_rank, "decoder")

    def parameter_counts(self) -> dict[str, int]:
        """Return the number of parameters of each part; biases are counted with their matrix.

        Example:
            >>> AttentionLayer("self", 0, 4096, 32, 8, 128, 128).parameter_counts()
            {'q_proj': 16777216, 'k_proj': 4194304, 'v_proj': 4194304, 'o_proj': 16777216}
        """
        return {part.name: part.parameters for part in self.parts()}

    def parameter_count(self) -> int:
        """Return the number of parameters of all parts."""
        return parameters(self.parts())

    # --- cache ------------------------------------------------------------------------------------------------------

    def cached_numbers(self) -> int:
        """Return the numbers that one token adds to the cache: K (D + V); if latent, its rank and the rotary part.

        An indexer adds its key; a layer that reads the keys of another adds nothing.

        Example:
            >>> AttentionLayer("self", 0, 7168, 128, 128, 192, 128, latent=Latent(512, 64)).cached_numbers()
            576
        """
        if self.role == "encoder" or self.keys_of is not None:
            return 0
        return self.key_value_numbers() + (0 if self.indexer is None else self.indexer.cached_numbers())

    def key_value_numbers(self) -> int:
        """Return the numbers of the keys and values of one token that this layer attends to, its own or another's."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        if self.shared_key is not None:
            return self.head_dim
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    def cached_vectors(self) -> int:
        """Return the vectors that one token adds to the cache, each with a scale in int8: 2 K, or 1 if latent."""
        if self.role == "encoder" or self.keys_of is not None:
            return 0
        return self.key_value_vectors() + (self.indexer is not None and not self.indexer.shared)

    def key_value_vectors(self) -> int:
        """Return the vectors of the keys and values of one token."""
        return 1 if self.latent is not None or self.shared_key is not None else 2 * self.num_kv_heads

    def cached_bytes(self, number_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes that one token adds to the cache."""
        return self.cached_numbers() * number_bytes + self.cached_vectors() * scale_bytes

    @property
    def compressor(self) -> Compressor | None:
        """What makes compressed keys, or None."""
        return None if self.shared_key is None else self.shared_key.compressor

    def compressed_bytes(self, number_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of one compressed key in the cache; 0 without a compressor."""
        one = self.compressor
        return 0 if one is None else one.cached_bytes(self.head_dim, number_bytes, scale_bytes)

    def compressed_keys(self, tokens: int, *, attended: bool = False) -> int:
        """Return the compressed keys of a text of `tokens` tokens: all, or those that its last query attends to."""
        if self.compressor is None:
            return 0
        return self.compressor.attended(tokens) if attended else tokens // self.compressor.rate

    def cached_tokens(self, context: int, source: int, *, windowed: bool = True) -> int:
        """Return the tokens in the cache: the encoder's for cross-attention, else the context, cut to the window."""
        tokens = source if self.role == "cross" else context
        return tokens if self.window is None or not windowed else min(tokens, self.window)

    def read_bytes(self, context: int, source: int, number_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of the cache that a decode step reads for one text.

        An indexer reads the index keys of all tokens, and its attention only the chosen ones; the same holds for
        compressed keys. A layer that reads the keys of another reads them once more.
        """
        if self.role == "encoder":
            return 0
        tokens = self.cached_tokens(context, source)
        each = self.key_value_numbers() * number_bytes + self.key_value_vectors() * scale_bytes
        if self.compressor is not None:
            return each * tokens + self.compressor.read_bytes(context, self.head_dim, number_bytes, scale_bytes)
        if self.indexer is None:
            return each * tokens
        index = 0 if self.indexer.shared else self.indexer.dim * number_bytes + scale_bytes
        return each * min(tokens, self.indexer.top_k) + index * tokens

    # --- operations -------------------------------------------------------------------------------------------------

    def pairs(self, queries: int, keys: int) -> int:
        """Return the (query, key) pairs that the mask allows; the last query is aligned with the last key.

        Example:
            >>> layer = AttentionLayer("self", 0, 8, 2, 2, 4, 4, window=3)
            >>> layer.pairs(5, 5), layer.pairs(1, 5)      # 1 + 2 + 3 + 3 + 3
            (12, 3)
        """
        if self.role == "cross":
            return queries * keys
        if self.role == "encoder":
            if self.window is None:
                return queries * keys
            reach = (self.window - 1) // 2
            return mask_pairs(0, queries, queries, left=reach, right=reach)
        first = max(0, keys - queries)
        if self.indexer is not None:
            return mask_pairs(first, keys - first, keys, left=self.indexer.top_k - 1)
        if self.chunked and self.window is not None:
            return mask_pairs(first, keys - first, keys, chunk=self.window)
        compressed = 0 if self.compressor is None else self.compressor.pairs(first, keys)
        return compressed + mask_pairs(first, keys - first, keys, left=None if self.window is None else self.window - 1)

    def position_macs(self, queries: int, keys: int) -> tuple[int, int]:
        """Return the multiply-adds of content-position terms: (once per pass, per text)."""
        if self.positions is None:
            return 0, 0
        rows, wide = self.positions.met(max(queries, keys)), self.num_heads * self.head_dim
        each = rows * wide * (queries * self.positions.keys + keys * self.positions.queries)
        return rows * self.d_model * wide * self.positions.made(), each

    def score_macs(self) -> int:
        """Return the multiply-adds of one (query, key) pair in all heads: ``H (D + V)``."""
        return self.num_heads * (self.head_dim + self.value_dim)

    def index_macs(self, queries: int, keys: int, *, masked: bool = True) -> int:
        """Return the multiply-adds of the indexer's scores over all earlier keys (`masked`) or over all keys."""
        first, one = max(0, keys - queries), self.compressor
        if one is not None and one.indexer is not None:
            pairs = one.pairs(first, keys, chosen=False) if masked else queries * self.compressed_keys(keys)
            return one.indexer.pair_macs() * pairs
        if self.indexer is None:
            return 0
        return self.indexer.pair_macs() * (mask_pairs(first, keys - first, keys) if masked else queries * keys)

    def absorbed_macs(self) -> tuple[int, int]:
        """Return the multiply-adds (per token, per pair) of latent attention in the latent space, as engines decode.

        k_proj is applied to the query and v_proj after the weighted sum, so neither runs over the cache again: a token
        costs ``H (rank (D - rope) + rank V)`` once, a pair ``H ((rank + rope) + rank)``.
        """
        assert self.latent is not None
        rank, rope = self.latent.kv_rank, self.latent.rope_dim
        per_token = self.num_heads * rank * (self.head_dim - rope + self.value_dim)
        return per_token, self.num_heads * (2 * rank + rope)

    def expansion_macs(self) -> int:
        """Return the multiply-adds that compute keys and values from one cached latent."""
        return sum(part.macs for part in self.parts() if part.name in ("k_proj", "v_proj"))

    def projection_macs(self, stream: str) -> int:
        """Return the multiply-adds of the projections for one token of the stream."""
        return macs(self.parts(), stream)


def with_kv_heads(layer: AttentionLayer, kv_heads: int) -> AttentionLayer:
    """Return the layer with another number of key-value heads; latent and sparse attention become plain attention.

    So does a window with compressed keys, which reaches all tokens.
    """
    window = layer.window if layer.compressor is None else None
    return replace(layer, num_kv_heads=kv_heads, latent=None, indexer=None, shared_key=None, window=window)
