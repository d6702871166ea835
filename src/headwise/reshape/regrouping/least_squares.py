"""Fit the shared keys and values of a group by least squares to its queries and output projections.

Rotations and a mean (`alignment`) give equal weight to all heads of a group and to every number. But the output
projection can undo any matrix on the values, and the queries' pair any complex factor on a pair of a key. So the shared
values can be the first principal components of the group's values, with each head weighted by its output projection;
and the shared keys those of its keys, with each head weighted by the queries that read them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout.head_weights import HeadWeights
from ..repair.moments import Moments
from .alignment import KeyBasis, aligned, unlike
from .head_maps import HeadMaps

UNUSED = 1e-12  # relative to the largest eigenvalue; nothing reads a direction below it


def fitted_maps(weights: HeadWeights, moments: Moments, groups: Sequence[Sequence[int]]) -> tuple[HeadMaps, HeadMaps]:
    """Return the maps of the keys and of the values; keys after a norm, which fixes their size, are aligned instead."""
    frame = KeyBasis(weights)
    values = HeadMaps.zeros(moments.value)
    keys = aligned(moments.key, groups, frame.rotations) if frame.normed else HeadMaps.zeros(moments.key)
    reads, meets = output_uses(weights), query_uses(weights, moments)
    for group in groups:
        members = list(group)
        values.write[members], values.read[members] = basis(moments.value[members][:, :, members], reads[members])
        if not frame.normed:
            own = moments.key[members][:, :, members], meets[members]
            keys.write[members], keys.read[members] = _key_basis(frame, *own)
    return keys, values


def _key_basis(frame: KeyBasis, products: Tensor, uses: Tensor) -> tuple[Tensor, Tensor]:
    """Return `basis` of a group's keys, (n, D, D) each: for every rotary pair, and for the other numbers."""
    made = torch.zeros(products.shape[0], *products.shape[1:2] * 2, dtype=products.dtype, device=products.device)
    write, read = made, made.clone()
    if len(frame.first):
        for into, factors in zip((write, read), basis(*_pairs(frame, products, uses)), strict=True):
            frame.put_pairs(into, factors[..., 0, 0].T)
    if len(frame.rest):
        for into, part in zip((write, read), basis(*_rest(frame, products, uses)), strict=True):
            into[:, frame.rest[:, None], frame.rest] = part
    return write, read


def fitted_differences(weights: HeadWeights, moments: Moments) -> Tensor:
    """Return the loss of every two heads that share fitted keys and values, (K, K), as shares of all, added up."""
    frame = KeyBasis(weights)
    K, meets = weights.num_kv_heads, query_uses(weights, moments)
    values = [(moments.value, output_uses(weights))]
    kinds = [kind for kind, places in ((_pairs, frame.first), (_rest, frame.rest)) if len(places)]
    keys = [] if frame.normed else [kind(frame, moments.key, meets) for kind in kinds]
    apart = torch.zeros(K, K, dtype=torch.float64, device=moments.key.device)
    for parts in (values, keys):
        seen = [_weighed(*part)[0] for part in parts]
        total = sum(float(torch.einsum("...ixix->...", part).real.sum()) for part in seen)
        for i in range(K):
            for j in range(i):
                two = [part[..., [i, j], :, :, :][..., [i, j], :] for part in seen]
                apart[i, j] += sum(_beyond(part) for part in two) / max(total, torch.finfo(torch.float64).tiny)
    apart = apart + apart.T
    return apart + unlike(moments.key, frame.agreement) if frame.normed else apart


def basis(products: Tensor, uses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps by which n heads of d numbers best share d numbers: write and read of `HeadMaps`, (..., n, d, d).

    ``products`` (..., n, d, n, d) are the sums over tokens of ``v_i v_j^H``; ``uses`` (..., n, d, d) weight the errors.
    The maps minimize the sum of ``e_i^H uses_i e_i`` for ``e_i = v_i - read_i m``. `m` is as large as a head.
    """
    n, d = products.shape[-2:]
    weighed, root, back = _weighed(products, uses)
    size, vectors = torch.linalg.eigh(weighed.flatten(-4, -3).flatten(-2))
    top = vectors[..., -d:].unflatten(-2, (n, d))  # (..., n, d, d): each head's part of the shared numbers
    wanted = torch.einsum("...ixix->...", products).real / n
    scale = (wanted / size[..., -d:].sum(-1).clamp_min(torch.finfo(size.dtype).tiny)).sqrt()[..., None, None, None]
    scale = torch.where(scale > 0, scale, 1.0)
    return scale * (top.mH @ root), back @ top / scale


def _weighed(products: Tensor, uses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the products in a basis where `uses` is the identity, the map to this basis, and the map back."""
    size, vectors = torch.linalg.eigh(uses)
    size = size.clamp_min(0)
    used = size > UNUSED * size.amax((-2, -1), keepdim=True)
    root = torch.where(used, size.sqrt(), 0.0)[..., None] * vectors.mH
    back = vectors * torch.where(used, 1 / size.sqrt(), 0.0)[..., None, :]
    root, back = root.to(products.dtype), back.to(products.dtype)
    return torch.einsum("...iab,...ibjc,...jdc->...iajd", root, products, root.conj()), root, back


def _beyond(weighed: Tensor) -> float:
    """Return the weighted squares that are lost when n heads share their best d numbers."""
    d = weighed.shape[-1]
    return float(torch.linalg.eigvalsh(weighed.flatten(-4, -3).flatten(-2))[..., :-d].clamp_min(0).sum())


def _pairs(frame: KeyBasis, products: Tensor, uses: Tensor) -> tuple[Tensor, Tensor]:
    """Return products and uses of each rotary pair, as one complex number."""
    return frame.pairs_of(products)[:, :, None, :, None], uses[:, frame.first, frame.first].T[..., None, None]


def _rest(frame: KeyBasis, products: Tensor, uses: Tensor) -> tuple[Tensor, Tensor]:
    """Return products and uses of the numbers without rotary positions."""
    return frame.rest_of(products), uses[:, frame.rest[:, None], frame.rest]


def output_uses(weights: HeadWeights) -> Tensor:
    """Return (K, V, V): for each value head the sum of ``W_O^T W_O`` over its query heads."""
    wide = weights.output.to(torch.float64)
    return torch.einsum("mhv,mhw->hvw", wide, wide).unflatten(0, (weights.num_kv_heads, -1)).sum(1)


def query_uses(weights: HeadWeights, moments: Moments) -> Tensor:
    """Return (K, D, D): for each key head the sum of ``q q^T`` over tokens and over its query heads.

    The two numbers of a rotary pair get equal weight and no cross terms, because over many distances a query is
    compared with a pair at every angle.
    """
    frame = KeyBasis(weights)
    plain = moments.query.unflatten(0, (weights.num_kv_heads, -1)).sum(1)
    made = torch.zeros_like(plain)
    first, second = frame.first, frame.second
    size = (plain[:, first, first] + plain[:, second, second]) / 2
    made[:, first, first] = made[:, second, second] = size
    made[:, frame.rest[:, None], frame.rest] = plain[:, frame.rest[:, None], frame.rest]
    return made
