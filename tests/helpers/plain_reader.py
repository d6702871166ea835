"""A small model whose three layers are of three families, and the same model in NumPy: float64, one row at a time.

The layers differ in every size (pairwise different primes), in biases, scale, softcap, sinks and mask, so that a sum
over the wrong axis, a wrong group or an option that is not passed on changes a number. `Plain` shares no code with
headwise: it reads the weights of the model and loops over heads, queries and keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import headwise
from headwise.nn import InnerAttention

Array = npt.NDArray[np.float64]
Head = tuple[int, int]

M, VOCABULARY = 29, 37
FAMILIES: dict[str, dict[str, Any]] = {
    "MHA": {"num_heads": 5, "head_dim": 7, "value_dim": 3, "bias": True},
    "GQA": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "value_dim": 11, "bias": "qkv"},
    "MQA": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 13, "value_dim": 2, "bias": False},
}
REACH = 5


class Mixed(nn.Module):
    """Three layers of attention on one residual stream, each behind a norm, a final norm and an unembedding.

    The layer of GQA has sinks and sees a window; that of MQA has a scale and a softcap. With `apart`, head h of the
    layer of MHA sees the key before and one in 5 - h keys.
    """

    families = ("MHA", "GQA", "MQA")

    def __init__(self, seed: int, *, ahead: bool = False, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.ahead, self.apart = ahead, apart
        self.embed, self.place = nn.Embedding(VOCABULARY, M), nn.Embedding(131, M)
        inner = {
            "MHA": InnerAttention(),
            "GQA": InnerAttention(sinks=torch.randn(6)),
            "MQA": InnerAttention(scale=0.61, softcap=7.3),
        }
        self.layers = nn.ModuleList(
            headwise.MultiHeadAttention(M, **FAMILIES[name], inner=inner[name]) for name in self.families
        )
        self.norms = nn.ModuleList(nn.RMSNorm(M, eps=1e-6) for _ in self.families)
        self.final, self.unembed = nn.RMSNorm(M, eps=1e-6), nn.Linear(M, VOCABULARY)
        for one in (*self.norms, self.final):
            nn.init.uniform_(one.weight, 0.5, 1.5)
        for layer in self.layers:
            for name in ("q_proj", "k_proj"):
                getattr(layer, name).weight.data.mul_(3)  # rows that prefer some keys clearly

    def mask(self, family: str, T: int) -> headwise.Mask | None:
        if self.ahead:
            return headwise.window(REACH, REACH) if family == "GQA" else None
        if self.apart and family == "MHA":
            back = torch.arange(T)[:, None] - torch.arange(T)
            return headwise.causal() & headwise.keep(
                torch.stack([(back % (5 - h) == 0) | (back == 1) for h in range(5)])
            )
        return headwise.causal() & headwise.window(REACH) if family == "GQA" else headwise.causal()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for name, norm, layer in zip(self.families, self.norms, self.layers, strict=True):
            x = x + layer(norm(x), mask=self.mask(name, ids.shape[1]))
        return self.unembed(self.final(x))


@dataclass
class PlainCall:
    """One layer on one text: query (H, T, D), key (H, T, D) and value (H, T, V) by query head, raw scores and weights
    (H, T, T), the keys that a head sees and those that any sees, outputs (H, T, V), and what heads write (H, T, M)."""

    q: Array
    k: Array
    v: Array
    raw: Array
    p: Array
    own: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.bool_]
    out: Array
    W_O: Array
    written: Array
    groups: int


@dataclass
class PlainRun:
    """A forward pass: the calls, the residual stream before the final norm (T, M), and logits (T, vocabulary)."""

    calls: list[PlainCall]
    residual: Array
    logits: Array

    def loss(self, ids: Sequence[int]) -> float:
        """Mean cross entropy with the next token, in nats."""
        return float(-np.mean([log_softmax(row)[i] for row, i in zip(self.logits, ids[1:], strict=False)]))


def log_softmax(x: Array) -> Array:
    top = x.max()
    return np.asarray(x - top - math.log(float(np.exp(x - top).sum())))


def rms(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight)


class Plain:
    """The model in NumPy. `change` maps (layer, head, output (T, V)) to the output that is used in its place."""

    def __init__(self, model: Mixed) -> None:
        self.model = model
        self.w = {name: part.detach().double().numpy() for name, part in model.state_dict().items()}

    def head_rows(self, layer: int, name: str, count: int) -> tuple[Array, Array]:
        """The matrices (heads, n, M) and biases (heads, n) of a projection."""
        weight = self.w[f"layers.{layer}.{name}.weight"]
        bias = self.w.get(f"layers.{layer}.{name}.bias", np.zeros(len(weight)))
        return np.stack(np.split(weight, count)), np.stack(np.split(bias, count))

    def sees(self, family: str, h: int, i: int, j: int) -> bool:
        if self.model.apart and family == "MHA" and (i - j) % (5 - h) and i - j != 1:
            return False
        near = (
            i - j < REACH and j - i <= REACH if family == "GQA" else True
        )  # of the keys before, one is the query's own
        return near and (self.model.ahead or j <= i)

    def call(self, layer: int, x: Array, change: Callable[[int, int, Array], Array] | None) -> PlainCall:
        family = self.model.families[layer]
        about = FAMILIES[family]
        H, K, D, V = (
            about["num_heads"],
            about.get("num_kv_heads", about["num_heads"]),
            *(about[name] for name in ("head_dim", "value_dim")),
        )
        T = len(x)
        parts = {}
        for name, count in (("q_proj", H), ("k_proj", K), ("v_proj", K)):
            weight, bias = self.head_rows(layer, name, count)
            heads = [x @ weight[n].T + bias[n] for n in range(count)]
            parts[name] = np.stack([heads[h * count // H] for h in range(H)])
        q, k, v = parts["q_proj"], parts["k_proj"], parts["v_proj"]
        scale = 0.61 if family == "MQA" else D**-0.5
        sinks = self.w.get(f"layers.{layer}.inner.sinks")
        raw, p = np.zeros((H, T, T)), np.zeros((H, T, T))
        own = np.array([[[self.sees(family, h, i, j) for j in range(T)] for i in range(T)] for h in range(H)])
        for h in range(H):
            for i in range(T):
                raw[h, i] = [scale * float(q[h, i] @ k[h, j]) for j in range(T)]
                scores = 7.3 * np.tanh(raw[h, i] / 7.3) if family == "MQA" else raw[h, i]
                powers = np.where(own[h, i], np.exp(scores), 0.0)
                p[h, i] = powers / (powers.sum() + (0.0 if sinks is None else math.exp(sinks[h])))
        out = np.stack([p[h] @ v[h] for h in range(H)])
        if change is not None:
            out = np.stack([change(layer, h, out[h]) for h in range(H)])
        W_O = np.stack(np.split(self.w[f"layers.{layer}.o_proj.weight"].T, H))  # (H, V, M)
        assert W_O.shape[1] == V
        return PlainCall(q, k, v, raw, p, own, own.any(0), out, W_O, np.stack([out[h] @ W_O[h] for h in range(H)]), K)

    def run(self, ids: Sequence[int], change: Callable[[int, int, Array], Array] | None = None) -> PlainRun:
        x = self.w["embed.weight"][list(ids)] + self.w["place.weight"][: len(ids)]
        calls = []
        for layer in range(len(self.model.families)):
            calls.append(self.call(layer, rms(x, self.w[f"norms.{layer}.weight"]), change))
            x = x + calls[-1].written.sum(0) + self.w.get(f"layers.{layer}.o_proj.bias", 0.0)
        logits = rms(x, self.w["final.weight"]) @ self.w["unembed.weight"].T + self.w["unembed.bias"]
        return PlainRun(calls, x, logits)

    def instead(self, ids: Sequence[int], outputs: Mapping[Head, Any]) -> PlainRun:
        """The run in which these heads give out other numbers: 0, (V,) or (T, V)."""
        return self.run(
            ids, lambda layer, h, out: np.zeros_like(out) + outputs[layer, h] if (layer, h) in outputs else out
        )

    @property
    def heads(self) -> list[Head]:
        return [
            (layer, h) for layer, name in enumerate(self.model.families) for h in range(FAMILIES[name]["num_heads"])
        ]


def drawn_text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def ranked(values: Sequence[float]) -> list[float]:
    """How many values are smaller, and half of the others that are equal."""
    return [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.corrcoef(ranked(a), ranked(b))[0, 1])
