"""Sparse attention: indexers that choose keys, and keys that are values, compressed from groups of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..config.fields import Fields
from ..shape import short
from .parts import Part, linear, vector

KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
RATES = {0: KINDS[0], 4: KINDS[1], 128: KINDS[2]}  # the kinds by the rates of older configs


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse attention: it scores all earlier keys with small heads, and attention reads the best ones.

    Attributes:
        heads: The number of its heads.
        dim: Their size; one index key of this size per token is cached, shared by all heads.
        top_k: The number of keys that a query attends to.
        shared: True if the layer attends to the keys that an earlier layer chose, so it has no indexer of its own.
    """

    heads: int
    dim: int
    top_k: int
    shared: bool = False

    def parts(self, width: int, q_rank: int, stream: str) -> Iterator[Part]:
        """Yield its matrices: queries from the latent of the queries, one key, and a weight for each head."""
        if self.shared:
            return
        yield linear("index_q_proj", "attention", q_rank, self.heads * self.dim, stream=stream)
        yield linear("index_k_proj", "attention", width, self.dim, stream=stream)
        yield vector("index_norm", "attention", 2 * self.dim, stream=stream)
        yield linear("index_weights", "attention", width, self.heads, stream=stream)

    def cached_numbers(self) -> int:
        """Return the numbers that one token adds to the cache."""
        return 0 if self.shared else self.dim

    def pair_macs(self) -> int:
        """Return the multiply-adds of one (query, key) pair: a score in each head, and their weighted sum."""
        return 0 if self.shared else self.heads * self.dim + self.heads


@dataclass(frozen=True)
class Compressor:
    """The part of a layer that makes one key out of `rate` tokens.

    Attributes:
        rate: The tokens of a compressed key.
        overlaps: True if a key is made from its own tokens and those of the key before, by matrices twice as wide.
        indexer: The indexer that chooses compressed keys for each query; it has compressed keys of its own. None if a
            query attends to all of them.
    """

    rate: int
    overlaps: bool
    indexer: Indexer | None = None

    def parts(self, width: int, dim: int, q_rank: int) -> Iterator[Part]:
        """Yield the matrices of the keys and of their gates, a bias for each place, and a norm."""
        yield from self._keys("compressed_k_proj", width, dim)
        if self.indexer is not None:
            one = self.indexer
            yield from self._keys("index_k_proj", width, one.dim)
            yield linear("index_q_proj", "attention", q_rank, one.heads * one.dim)
            yield linear("index_weights", "attention", width, one.heads)

    def _keys(self, name: str, width: int, dim: int) -> Iterator[Part]:
        columns = dim * (2 if self.overlaps else 1)
        yield linear(name, "attention", width, columns)
        yield linear(name.replace("k_proj", "gate"), "attention", width, columns)
        yield vector(name.replace("k_proj", "places"), "attention", self.rate * columns)
        yield vector(name.replace("k_proj", "norm"), "attention", dim)

    def cached_bytes(self, dim: int, number_bytes: int, scale_bytes: int) -> int:
        """Return the bytes of one compressed key, with the key of the indexer."""
        return dim * number_bytes + scale_bytes + self._index_bytes(number_bytes, scale_bytes)

    def read_bytes(self, tokens: int, dim: int, number_bytes: int, scale_bytes: int) -> int:
        """Return the bytes that one query reads: the compressed keys that it attends to, and all index keys."""
        index = tokens // self.rate * self._index_bytes(number_bytes, scale_bytes)
        return self.attended(tokens) * (dim * number_bytes + scale_bytes) + index

    def _index_bytes(self, number_bytes: int, scale_bytes: int) -> int:
        return 0 if self.indexer is None else self.indexer.dim * number_bytes + scale_bytes

    def attended(self, keys: int) -> int:
        """Return the compressed keys that the last of `keys` tokens attends to."""
        return keys // self.rate if self.indexer is None else min(keys // self.rate, self.indexer.top_k)

    def pairs(self, first: int, stop: int, *, chosen: bool = True) -> int:
        """Return the pairs of the queries first <= i < stop and the compressed keys that end before or at them.

        Example:
            >>> Compressor(4, True, Indexer(2, 8, 1)).pairs(0, 9), Compressor(4, True).pairs(0, 9)  # 0 0 0 1 1 1 1 2 2
            (6, 8)
        """
        most = None if self.indexer is None or not chosen else self.indexer.top_k
        return _sums(stop, self.rate, most) - _sums(first, self.rate, most)


def _sums(n: int, rate: int, most: int | None) -> int:
    """Return the sum of min(most, m // rate) over 1 <= m <= n."""
    whole = n if most is None else min(n, most * rate - 1)
    full, rest = divmod(whole, rate)
    below = rate * full * (full - 1) // 2 + full * (rest + 1)
    return below if most is None else below + most * (n - whole)


@dataclass(frozen=True)
class SharedKey:
    """One key per token for all heads, which is also the value, and a low-rank output projection by groups of heads.

    Attributes:
        q_rank: Width of the latent for queries.
        out_groups: Groups of heads in the output projection.
        out_rank: Width of the output of each group.
        compressor: What makes compressed keys, which are attended beside the window; None for a layer without.
    """

    q_rank: int
    out_groups: int
    out_rank: int
    compressor: Compressor | None = None

    def parts(self, width: int, heads: int, dim: int) -> Iterator[Part]:
        """Yield the projections of a layer, its sinks, and its compressor."""
        yield linear("q_down", "attention", width, self.q_rank)
        yield vector("q_norm", "attention", self.q_rank)
        yield linear("q_proj", "attention", self.q_rank, heads * dim)
        yield linear("k_proj", "attention", width, dim)
        yield vector("k_norm", "attention", dim)
        yield linear("o_down", "attention", heads * dim // self.out_groups, self.out_groups * self.out_rank)
        yield linear("o_proj", "attention", self.out_groups * self.out_rank, width)
        yield vector("sinks", "attention", heads)
        if self.compressor is not None:
            yield from self.compressor.parts(width, dim, self.q_rank)


def shared_keys(fields: Fields, layers: int) -> list[SharedKey | None]:
    """Return the shared key of each layer; None for all if the architecture has none.

    Raises:
        ValueError: a field with an invalid value.
    """
    about: dict[str, str] | None = fields.architecture.get("shared_key")
    if about is None:
        return [None] * layers
    fields.size("sliding_window")  # every layer has it
    groups, rank, q_rank = (fields.size(about[name]) for name in ("out_groups", "out_rank", "q_rank"))
    wide = fields.size("num_attention_heads") * fields.size("head_dim")
    if wide % groups:
        raise ValueError(f"{about['out_groups']} = {groups} does not divide heads times head_dim = {wide}")
    heads, dim, top_k = (fields.size(about[name]) for name in ("index_heads", "index_dim", "index_top_k"))
    indexer = Indexer(heads, dim, top_k)
    rates = _rates(fields, about)
    compressors = {
        KINDS[0]: None,
        KINDS[1]: Compressor(rates[KINDS[1]], True, indexer),
        KINDS[2]: Compressor(rates[KINDS[2]], False),
    }
    return [SharedKey(q_rank, groups, rank, compressors[kind]) for kind in _kinds(fields, about, layers)]


def _rates(fields: Fields, about: dict[str, str]) -> dict[str, int]:
    """Return the tokens of a compressed key by kind, from an object or from the two fields of older configs."""
    found = fields.config.get(about["rates"])
    if not isinstance(found, dict | None):
        raise ValueError(f"{about['rates']} is an object; got {short(found)}")
    found = dict(fields.defaults[about["rates"]] if found is None else found)
    for kind, older in zip(KINDS[1:], ("compress_rate_csa", "compress_rate_hca"), strict=True):
        rate: Any = fields.config.get(older)
        found[kind] = rate = found.get(kind) if rate is None else rate
        if not isinstance(rate, int) or isinstance(rate, bool) or not 1 <= rate <= 10**6:
            raise ValueError(f"{about['rates']} has a whole number from 1 to 1,000,000 for {kind}; got {short(rate)}")
    return found


def _kinds(fields: Fields, about: dict[str, str], layers: int) -> list[str]:
    """Return the kind of each layer: listed, by the rates of older configs, or two of a kind and then alternating."""
    kinds = fields.words("layer_types", layers, KINDS)
    if kinds is not None:
        return kinds
    listed = fields.config.get("compress_ratios")
    if listed is None:
        return [KINDS[1] if i >= 2 and i % 2 else KINDS[2] for i in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or not all(type(n) is int and n in RATES for n in listed):
        raise ValueError(f"compress_ratios has 0, 4 or 128 for each of {layers} layers; got {short(listed)}")
    return [RATES[rate] for rate in listed[:layers]]
