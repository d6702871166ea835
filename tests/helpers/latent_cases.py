"""For the tests of latent attention: its definition head by head, small modules, and a cache of the least kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import headwise
from headwise import LatentAttention
from headwise.nn import rotate

B, T, H, M = 2, 19, 3, 23
SIZES: dict[str, Any] = {"kv_lora_rank": 17, "nope_dim": 7, "rope_dim": 6, "value_dim": 11}
KINDS: dict[str, dict[str, Any]] = {
    "direct": SIZES,
    "low rank": SIZES | {"q_lora_rank": 13},
    "biases": SIZES | {"q_lora_rank": 13, "bias": True},
    "small rank": SIZES | {"kv_lora_rank": 5},
    "scale": SIZES | {"scale": 0.41},
}
FORMS = ("expanded", "absorbed")


def stirred(module: nn.Module) -> Any:
    """Weights of unit gain, so that attention is far from uniform; norms and biases moved from where they start."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                gain = 2.0 if name in ("q_proj.weight", "q_b_proj.weight") else 1.0
                parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def make(**arguments: Any) -> LatentAttention:
    return stirred(LatentAttention(M, H, **SIZES | arguments))


def textbook(mla: LatentAttention, x: Tensor, allowed: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
    """(B, T, M) by the definition, a head at a time, with its matrices taken from the state dict by hand."""
    weights = mla.state_dict()
    C, N, V = mla.kv_lora_rank, mla.nope_dim, mla.value_dim

    def linear(name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights[f"{name}.weight"]

    positions = torch.arange(x.shape[1]) if positions is None else positions
    pairs = torch.arange(0, mla.rope_dim, 2, dtype=x.dtype)
    angles = positions.to(x.dtype)[..., None] * 10000.0 ** (-pairs / mla.rope_dim)

    def turn(x: Tensor) -> Tensor:
        return rotate(x, angles.cos(), angles.sin(), interleaved=True)

    queries = linear("q_proj", x) if mla.q_lora_rank is None else None
    queries = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x))) if queries is None else queries
    down = linear("kv_a_proj_with_mqa", x)
    latent, k_rope = norm("kv_a_layernorm", down[..., :C]), turn(down[..., C:])
    heads = []
    for i in range(mla.num_heads):
        query = queries[..., i * mla.head_dim : (i + 1) * mla.head_dim]
        up = weights["kv_b_proj.weight"][i * (N + V) : (i + 1) * (N + V)]
        scores = query[..., :N] @ (latent @ up[:N].T).mT + turn(query[..., N:]) @ k_rope.mT
        scores = scores * mla.scale
        scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        heads.append(torch.softmax(scores, dim=-1) @ (latent @ up[N:].T))
    return linear("o_proj", torch.cat(heads, dim=-1))


def rms(out: Tensor, exact: Tensor) -> float:
    """Root of the mean squared error."""
    return float((out.detach().double() - exact.detach()).square().mean().sqrt())


class Sealed:
    """A cache of the least kind: one tensor of room for all, one length a row. It is attended to and shows no keys."""

    def __init__(self, batch: int, room: int, width: int, value_dim: int, dtype: torch.dtype = torch.float32) -> None:
        self.room = torch.full((batch, 1, room, width), torch.nan, dtype=dtype)  # what was never written is never read
        self.value_dim = value_dim
        self.lengths = self.first = [0] * batch
        self.causal = True
        self.appended: list[tuple[int, ...]] = []

    @classmethod
    def of(cls, mla: LatentAttention, batch: int, room: int = 64) -> Any:
        width = mla.kv_lora_rank + mla.rope_dim
        return cls(batch, room, width, mla.kv_lora_rank, mla.o_proj.weight.dtype)

    def append(self, key: Tensor, value: Tensor | None = None, *, lengths: Any = None) -> Any:
        assert value is None
        self.appended.append(tuple(key.shape))
        counts = [key.shape[2]] * len(self.lengths) if lengths is None else [int(n) for n in lengths]
        for row, (new, have, count) in enumerate(zip(key.detach(), self.lengths, counts, strict=True)):
            self.room[row, :, have : have + count] = new[:, :count]
        self.lengths = [have + count for have, count in zip(self.lengths, counts, strict=True)]
        self.first = [end - count for end, count in zip(self.lengths, counts, strict=True)]
        return self

    def attend(self, query: Tensor, *, mask: Any = None, **options: Any) -> Tensor:
        keys = self.room[:, :, : max(self.lengths)]
        rule = headwise.causal(offset=torch.tensor(self.first)) & headwise.lengths(torch.tensor(self.lengths))
        real = torch.arange(query.shape[2]) < (torch.tensor(self.lengths) - torch.tensor(self.first))[:, None]
        rule = rule & headwise.keep(real[:, None, :, None])
        rule = rule if mask is None else rule & mask
        return headwise.attention(query, keys, keys[..., : self.value_dim], mask=rule, **options)

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget what each row holds beyond its length, such as the padding of a prompt."""
        self.lengths = list(lengths)


class Held(Sealed):
    """One that shows its keys, too."""

    @property
    def keys(self) -> Tensor:
        return self.room[:, :, : max(self.lengths)]
