"""What one computes of a plain model's attention matrices, outputs and weights: the other side of the tests of look."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from plain_reader import Array, Head, M, Plain

CLOSE = 3e-5  # of weights and masses: float32 scores of size 3 differ by 1e-6, and sums of 41 rows by less
LOOSE = 2e-4  # of losses, logits and lengths, which are sums over the width and three layers


def near(value: Any, expected: Any, within: float = CLOSE) -> bool:
    return bool(np.allclose(np.asarray(value, float), np.asarray(expected, float), rtol=within, atol=within))


def over_keys(p: Array) -> Array:
    """The rows relative to their mass on keys: a sink column takes the rest."""
    return np.asarray(p / p.sum(-1, keepdims=True))


def pooled(p: Array, size: int) -> Array:
    T, S = p.shape
    X, Y = min(size, T), min(size, S)
    cells, rows = np.zeros((X, Y)), np.zeros((X, 1))
    for i, j in itertools.product(range(T), range(S)):
        cells[i * X // T, j * Y // S] += p[i, j]
    for i in range(T):
        rows[i * X // T] += 1
    return np.asarray(cells / rows)


def lengths(call: Any) -> Array:
    """|v_j W_O| of each head and key, (H, T)."""
    return np.asarray(np.linalg.norm(np.einsum("htv,hvm->htm", call.v, call.W_O), axis=-1))


def row_entropy(row: Array) -> float:
    """That of the whole softmax: what the keys do not have lies on one column more."""
    rest = 1 - row.sum()
    return float(-sum(w * math.log(w) for w in row if w > 0) - (rest * math.log(rest) if rest > 1e-9 else 0.0))


def means(runs: list[Any], layer: int, h: int) -> dict[str, Any]:
    """The numbers of one head over the rows of all texts."""
    ps = [run.calls[layer].p[h] for run in runs]
    seen = [run.calls[layer].seen for run in runs]
    rows = [(p, i) for p in ps for i in range(len(p))]

    def at(offset: int) -> float:
        masses = [
            p[i, i + offset] for p, s in zip(ps, seen, strict=True) for i in range(len(p))
            if 0 <= i + offset < len(p) and s[i, i + offset]
        ]  # fmt: skip
        return float(sum(masses) / max(len(masses), 1))

    return {
        "entropy": np.mean([row_entropy(p[i]) for p, i in rows]),
        "largest": np.mean([p[i].max() for p, i in rows]),
        "distance": np.mean([sum(abs(i - j) * w for j, w in enumerate(over_keys(p)[i])) for p, i in rows]),
        "offsets": [at(-k) for k in range(9)],
        "ahead": [at(k) for k in range(1, 9)],
    }


def divergence(p: Array, q: Array) -> float:
    """Jensen and Shannon's, in bits: the mean distance of both rows from their mean."""
    return float(sum(
        x * math.log2(x / ((a + b) / 2)) / 2 for a, b in zip(p, q, strict=True) for x in (a, b) if x > 0
    ))  # fmt: skip


def hsic(K: Array, L: Array) -> float:
    """The unbiased estimate, from matrices without their diagonals (Song et al. 2012)."""
    n = len(K)
    K, L = K - np.diag(np.diag(K)), L - np.diag(np.diag(L))
    one = np.ones(n)
    rest = one @ K @ one * (one @ L @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ K @ L @ one)
    return float((np.trace(K @ L) + rest) / (n * (n - 3)))


def joined(far: Array, threshold: float) -> set[tuple[int, ...]]:
    """Clusters by average linkage: the closest two clusters are joined while their mean distance is small enough."""
    groups = [[n] for n in range(len(far))]
    while len(groups) > 1:
        gap, a, b = min(
            (float(np.mean([far[i, j] for i in x for j in y])), m, n)
            for m, x in enumerate(groups) for n, y in enumerate(groups) if m < n
        )  # fmt: skip
        if gap > threshold:
            break
        groups[a] += groups.pop(b)
    return {tuple(sorted(group)) for group in groups if len(group) > 1}


def matrices(plain: Plain, layer: int, h: int) -> tuple[Array, Array, Array, Array]:
    """W_Q, W_K (D, M) with the norm before them, W_V (V, M), W_O (V, M) of one head."""
    about = plain.call(layer, np.zeros((1, M)), None)
    H, K = len(about.q), about.groups
    norm = plain.w[f"norms.{layer}.weight"]
    q, k, v = (
        plain.head_rows(layer, name, count)[0][h * count // H] * norm
        for name, count in (("q_proj", H), ("k_proj", K), ("v_proj", K))
    )
    return q, k, v, about.W_O[h]


def compositions(plain: Plain) -> dict[tuple[str, Head, Head], float]:
    """Elhage et al.'s compositions from whole M x M products."""
    table = {}
    for reader, writer in itertools.product(plain.heads, plain.heads):
        if writer[0] < reader[0]:
            (Q, K, V, out), (_, _, v, o) = matrices(plain, *reader), matrices(plain, *writer)
            QK, OV, ov = Q.T @ K, out.T @ V, o.T @ v
            for kind, outer in (("q", QK.T), ("k", QK), ("v", OV)):
                size = np.linalg.norm(outer) * np.linalg.norm(ov)
                table[kind, reader, writer] = float(np.linalg.norm(outer @ ov) / size)
    return table
