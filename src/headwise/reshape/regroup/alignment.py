"""Heads in one frame: turns of each head's keys and values that its queries and its output take back.

A head's values may be turned by any orthogonal matrix, for the output projection turns them back; its keys too, for its
queries turn alike, as long as the turn commutes with what stands between projection and score. Rotary positions leave
one angle for each pair of numbers, a norm's weights less. As in Jin et al. 2024, "Align Attention Heads Before Merging
Them: An Effective Way for Converting MHA to GQA", arXiv 2412.20677. `fit` takes back more than turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ..layout.head_weights import HeadWeights
from ..maps import Maps
from ..repair.moments import Moments

ROUNDS = 100  # a frame settles within ten or so
SETTLED = 1e-12  # of the agreement; what a further round gains
OPEN = 1e-9  # of the largest product; smaller ones do not tell how to turn


def aligned_values(moments: Moments, groups: Sequence[Sequence[int]]) -> Maps:
    """Return the mean of each group's values, turned to be closest to each other."""
    rotations = Maps.zeros(moments.value).read
    for group in groups:
        members = list(group)
        rotations[members] = orthogonal_rotations(moments.value[members][:, :, members])
    return Maps.of_rotations(rotations, groups)


def aligned_keys(frame: KeyBasis, moments: Moments, groups: Sequence[Sequence[int]]) -> Maps:
    """Return the mean of each group's keys, turned to be closest to each other."""
    rotations = Maps.zeros(moments.key).read
    for group in groups:
        members = list(group)
        rotations[members] = frame.rotations(moments.key[members][:, :, members])
    return Maps.of_rotations(rotations, groups)


class KeyBasis:
    """Which turns of a layer's keys its queries can take back, and the best of them.

    A pair of numbers that turns with the position may turn by an angle, the numbers beside them by any orthogonal
    matrix. With an rms norm before that, its weights must be the same for all numbers that mix, or only signs are left;
    a layer norm takes off the mean, and leaves nothing.
    """

    def __init__(self, weights: HeadWeights) -> None:
        D = weights.head_dim
        norms = [norm for norm in (weights.query_norm, weights.key_norm) if norm is not None]
        self.normed = bool(norms)
        self.fixed = bool(norms) and weights.norm == "layer"
        none = torch.arange(0, device="cpu")
        self.first, self.second = weights.rotary.pairs() if weights.rotary is not None else (none, none)
        self.rest = torch.arange(2 * len(self.first), D, device="cpu")
        rows = torch.cat([norm.reshape(-1, D) for norm in norms]) if norms else weights.query.new_ones(1, D)
        self.free_pairs = (rows[:, self.first] == rows[:, self.second]).all(0)
        self.free_rest = bool((rows[:, self.rest] == rows[:, self.rest][:, :1]).all())

    def rotations(self, moments: Float[Tensor, "n D n D"]) -> Float[Tensor, "n D D"]:
        """Return the rotations of a group's heads."""
        n, D = moments.shape[:2]
        made = torch.eye(D, dtype=moments.dtype, device=moments.device).repeat(n, 1, 1)
        if self.fixed:
            return made
        if len(self.first):
            self.put_pairs(made, phases(self.pairs_of(moments), self.free_pairs.to(moments.device)))
        if len(self.rest):
            inner = self.rest_of(moments)
            made[:, self.rest[:, None], self.rest] = (
                orthogonal_rotations(inner) if self.free_rest else sign_flips(inner)
            )
        return made

    def put_pairs(self, into: Float[Tensor, "n D D"], factors: Complex[Tensor, "n pairs"]) -> None:
        """Write the matrices that multiply pairs, as complex numbers, by these factors."""
        first, second = self.first, self.second
        into[:, first, first] = into[:, second, second] = factors.real
        into[:, second, first] = factors.imag
        into[:, first, second] = -factors.imag

    def rest_of(self, moments: Float[Tensor, "n D m D"]) -> Float[Tensor, "n R m R"]:
        """Return the moments of the numbers that do not turn with the position."""
        return moments[:, self.rest][:, :, :, self.rest]

    def pairs_of(self, moments: Float[Tensor, "n D n D"]) -> Complex[Tensor, "pairs n n"]:
        """Moments of each pair of numbers as one complex number: the sum of ``k_i conj(k_j)``."""
        a, b = self.first, self.second

        def part(one: Tensor, other: Tensor) -> Tensor:
            return moments[:, one, :, other]  # indices on both sides of a slice: their axis comes first

        return torch.complex(part(a, a) + part(b, b), part(b, a) - part(a, b))

    def agreement(self, moments: Float[Tensor, "K D K D"]) -> Float[Tensor, "K K"]:
        """For every two heads the largest sum of ``k_i . k_j`` over tokens that turns can reach."""
        rest = self.rest_of(moments)
        if self.fixed:
            return torch.einsum("idjd->ij", moments)
        pairs = self.pairs_of(moments)
        free = self.free_pairs.to(moments.device)[:, None, None]
        reached = torch.where(free, pairs.abs(), pairs.real.abs()).sum(0)
        return reached + (nuclear(rest) if self.free_rest else torch.einsum("idjd->ijd", rest).abs().sum(-1))


def aligned_differences(weights: HeadWeights, moments: Moments) -> Float[Tensor, "K K"]:
    """How far every two heads' keys, and values, stay from each other after turning, as shares of all, added up."""
    return unlike(moments.key, KeyBasis(weights).agreement) + unlike(moments.value, nuclear)


def unlike(products: Float[Tensor, "K n K n"], agreement: Callable[[Tensor], Tensor]) -> Float[Tensor, "K K"]:
    """Return the squared distance of every two heads at their largest agreement, as a share of the squares of all."""
    square = torch.einsum("idid->i", products)
    apart = square[:, None] + square - 2 * agreement(products)
    return apart.clamp_min(0) / square.sum().clamp_min(torch.finfo(torch.float64).tiny)


def phases(pairs: Complex[Tensor, "pairs n n"], free: Tensor) -> Complex[Tensor, "n pairs"]:
    """Unit numbers u that make the sum of ``conj(u_i) c_ij u_j`` as large as it gets; the first head's is 1.

    Begins at the best vector of any length, the first of c's eigenvectors; where a pair is not `free`, u is 1 or -1.
    """
    n = pairs.shape[-1]

    def unit(z: Tensor) -> Tensor:
        length = z.abs()
        turn = torch.where(length > 0, z / length.clamp_min(torch.finfo(length.dtype).tiny), torch.ones_like(z))
        return torch.where(free, turn, torch.where(z.real < 0, -1.0, 1.0).to(z.dtype))

    best = torch.linalg.eigh(pairs).eigenvectors[..., -1].T  # (n, pairs)
    u = unit(best * best[:1].conj())
    before = -torch.inf
    for _ in range(ROUNDS):
        for i in range(n):
            others = torch.einsum("pj,jp->p", pairs[:, i], u) - pairs[:, i, i] * u[i]
            u[i] = unit(others) if n > 1 else u[i]
        now = float(torch.einsum("ip,pij,jp->", u.conj(), pairs, u).real)
        if now - before <= SETTLED * abs(now):
            break
        before = now
    u = unit(u * u[:1].conj())
    u[0] = 1.0  # not only to rounding
    return u


def orthogonal_rotations(moments: Float[Tensor, "n V n V"]) -> Float[Tensor, "n V V"]:
    """Generalized Procrustes: orthogonal Q that make the sum of ``tr(Q_i^T C_ij Q_j)`` as large as it gets.

    One head after the other is turned to the sum of the others (Gower 1975, "Generalized Procrustes analysis", for
    heads in place of shapes), from a start at the head that agrees most with the rest. The first head's is 1.
    """
    n, V = moments.shape[:2]
    blocks = moments.transpose(1, 2)  # (n, n, V, V)
    Q = torch.eye(V, dtype=moments.dtype, device=moments.device).repeat(n, 1, 1)
    center = int(nuclear(moments).sum(1).argmax())
    for i in range(n):
        Q[i] = Q[i] if i == center else nearest_orthogonal(blocks[i, center])
    before = -torch.inf
    for _ in range(ROUNDS):
        for i in range(n):
            others = torch.einsum("jvw,jwx->vx", blocks[i], Q) - blocks[i, i] @ Q[i]
            Q[i] = nearest_orthogonal(others) if n > 1 else Q[i]
        now = float(torch.einsum("ivx,ijvw,jwx->", Q, blocks, Q))
        if now - before <= SETTLED * abs(now):
            break
        before = now
    Q = Q @ Q[0].T.clone()
    Q[0] = torch.eye(V, dtype=Q.dtype, device=Q.device)
    return Q


def sign_flips(moments: Float[Tensor, "n D n D"]) -> Float[Tensor, "n D D"]:
    """As `orthogonal_rotations`, where each number may at most change its sign."""
    diagonal = torch.einsum("idjd->dij", moments)
    free = torch.zeros(diagonal.shape[0], dtype=torch.bool, device=moments.device)
    return torch.diag_embed(phases(torch.complex(diagonal, torch.zeros_like(diagonal)), free).real)


def nearest_orthogonal(matrix: Float[Tensor, "V V"]) -> Float[Tensor, "V V"]:
    """Return the orthogonal Q with the largest ``tr(Q^T matrix)``; what the matrix leaves open stays as it is."""
    open_ends = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device) * (OPEN * matrix.abs().max())
    U, _, Vh = torch.linalg.svd(matrix + open_ends)
    return U @ Vh


def nuclear(moments: Float[Tensor, "n V n V"]) -> Float[Tensor, "n n"]:
    """For every two heads the largest sum of ``v_i . v_j`` over tokens that orthogonal turns can reach."""
    return torch.linalg.svdvals(moments.transpose(1, 2)).sum(-1)
