"""Rotate the heads of a group into one basis before their keys and values are averaged.

Any orthogonal matrix may rotate a head's values, because the output projection can rotate them back. Keys may be
rotated too, because queries can be rotated in the same way, if the rotation commutes with all operations between
projection and score. Rotary positions leave one angle for each pair of numbers; the weights of a norm leave less. See
Jin et al. 2024, "Align Attention Heads Before Merging Them: An Effective Way for Converting MHA to GQA", arXiv
2412.20677. `least_squares` allows more than rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from ..layout.head_weights import HeadWeights
from ..repair.moments import Moments
from .head_maps import HeadMaps

ROUNDS = 100  # the rotations converge within about ten
SETTLED = 1e-12  # relative gain of a round below which the iteration stops
OPEN = 1e-9  # relative to the largest product; smaller products do not determine a rotation


def aligned(
    products: Float[Tensor, "K n K n"], groups: Sequence[Sequence[int]], rotations_of: Callable[[Tensor], Tensor]
) -> HeadMaps:
    """Return the maps to the mean of each group's keys or values, after rotating them closest to each other.

    `rotations_of` returns the rotations of a group from its moments: `KeyBasis.rotations` or `orthogonal_rotations`.
    """
    rotations = HeadMaps.zeros(products).read
    for group in groups:
        members = list(group)
        rotations[members] = rotations_of(products[members][:, :, members])
    return HeadMaps.of_rotations(rotations, groups)


class KeyBasis:
    """The rotations of a layer's keys that its queries can undo, and the best of them.

    A pair of numbers with rotary positions may rotate by an angle, the other numbers by any orthogonal matrix. With an
    RMS norm, the norm's weights must be equal for all numbers that mix; otherwise only changes of sign are possible. A
    layer norm subtracts the mean, so no rotation is possible.
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
        """Return the rotations that align a group's keys, from their moments."""
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
        """Write matrices into `into` that multiply each pair, as a complex number, by its factor."""
        first, second = self.first, self.second
        into[:, first, first] = into[:, second, second] = factors.real
        into[:, second, first] = factors.imag
        into[:, first, second] = -factors.imag

    def rest_of(self, moments: Float[Tensor, "n D m D"]) -> Float[Tensor, "n R m R"]:
        """Return the moments of the numbers without rotary positions."""
        return moments[:, self.rest][:, :, :, self.rest]

    def pairs_of(self, moments: Float[Tensor, "n D n D"]) -> Complex[Tensor, "pairs n n"]:
        """Return the moments of each pair as a complex number: the sum of ``k_i conj(k_j)``."""
        a, b = self.first, self.second

        def part(one: Tensor, other: Tensor) -> Tensor:
            return moments[:, one, :, other]  # with indices on both sides of a slice, their axis comes first

        return torch.complex(part(a, a) + part(b, b), part(b, a) - part(a, b))

    def agreement(self, moments: Float[Tensor, "K D K D"]) -> Float[Tensor, "K K"]:
        """Return for every two heads the largest sum of ``k_i . k_j`` over tokens that rotations can reach."""
        rest = self.rest_of(moments)
        if self.fixed:
            return torch.einsum("idjd->ij", moments)
        pairs = self.pairs_of(moments)
        free = self.free_pairs.to(moments.device)[:, None, None]
        reached = torch.where(free, pairs.abs(), pairs.real.abs()).sum(0)
        return reached + (nuclear(rest) if self.free_rest else torch.einsum("idjd->ijd", rest).abs().sum(-1))


def aligned_differences(weights: HeadWeights, moments: Moments) -> Float[Tensor, "K K"]:
    """Return for every two heads the distances of keys and of values after rotation, as shares of all, added up."""
    return unlike(moments.key, KeyBasis(weights).agreement) + unlike(moments.value, nuclear)


def unlike(products: Float[Tensor, "K n K n"], agreement: Callable[[Tensor], Tensor]) -> Float[Tensor, "K K"]:
    """Return for every two heads the squared distance at their largest agreement, as a share of all squares."""
    square = torch.einsum("idid->i", products)
    apart = square[:, None] + square - 2 * agreement(products)
    return apart.clamp_min(0) / square.sum().clamp_min(torch.finfo(torch.float64).tiny)


def phases(pairs: Complex[Tensor, "pairs n n"], free: Tensor) -> Complex[Tensor, "n pairs"]:
    """Return unit numbers u that maximize the sum of ``conj(u_i) c_ij u_j``; the first head's is 1.

    The start is the first eigenvector of c, the optimum without the unit length. If a pair is not `free`, u is 1 or -1.
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
    u[0] = 1.0  # exactly, not only up to rounding
    return u


def orthogonal_rotations(moments: Float[Tensor, "n V n V"]) -> Float[Tensor, "n V V"]:
    """Return orthogonal Q that maximize the sum of ``tr(Q_i^T C_ij Q_j)`` (generalized Procrustes); the first is I.

    Each head in turn is rotated to the sum of the others (Gower 1975, "Generalized Procrustes analysis", with heads in
    place of shapes). The start is the head that agrees most with the rest.
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
    """Return the best rotations as `orthogonal_rotations` does, if each number may only change its sign."""
    diagonal = torch.einsum("idjd->dij", moments)
    free = torch.zeros(diagonal.shape[0], dtype=torch.bool, device=moments.device)
    return torch.diag_embed(phases(torch.complex(diagonal, torch.zeros_like(diagonal)), free).real)


def nearest_orthogonal(matrix: Float[Tensor, "V V"]) -> Float[Tensor, "V V"]:
    """Return the orthogonal Q with the largest ``tr(Q^T matrix)``; undetermined directions stay as they are."""
    open_ends = torch.eye(matrix.shape[0], dtype=matrix.dtype, device=matrix.device) * (OPEN * matrix.abs().max())
    U, _, Vh = torch.linalg.svd(matrix + open_ends)
    return U @ Vh


def nuclear(moments: Float[Tensor, "n V n V"]) -> Float[Tensor, "n n"]:
    """Return for every two heads the largest sum of ``v_i . v_j`` over tokens that rotations can reach."""
    return torch.linalg.svdvals(moments.transpose(1, 2)).sum(-1)
