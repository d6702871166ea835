"""The numbers of the tour, computed by Python: what the page must show on the default text.

`Reference` is the model once more, in 40 lines of torch that know every switch of the page; tests/test_tour_claims.py
holds it against transformers and `headwise.look`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig

from headwise import models


@dataclass(frozen=True)
class Switches:
    """What differs from the untouched model, by the names of the page's engine."""

    off: tuple[tuple[int, int], ...] = ()
    causal: bool = True
    rotary: bool = True
    scaled: bool = True
    onePattern: tuple[int, ...] = ()
    kv: int = 8


@dataclass(frozen=True)
class Run:
    """Logits (T, vocabulary), and of each layer the weights (H, T, T) and the concatenation (T, width)."""

    logits: Tensor
    weights: list[Tensor] = field(default_factory=list)
    joined: list[Tensor] = field(default_factory=list)


class Reference:
    """The packaged model in one dtype."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.config = LlamaConfig.from_pretrained(models.tiny_path())
        self.tensors = {k: v.to(dtype) for k, v in load_file(models.tiny_path() / "model.safetensors").items()}
        self.heads, self.dim, self.dtype = self.config.num_attention_heads, self.config.head_dim, dtype

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.tensors[name]

    def turned(self, x: Tensor) -> Tensor:
        """Heads (H, T, D), rotated by position."""
        place = torch.arange(x.shape[1], dtype=torch.float64)[:, None]
        angle = place * 10000.0 ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        cos, sin = (f(angle).to(self.dtype) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def __call__(self, ids: Sequence[int], switches: Switches = Switches()) -> Run:
        run = Run(torch.empty(0))
        x = self.tensors["model.embed_tokens.weight"][list(ids)]
        for layer in range(self.config.num_hidden_layers):
            at = f"model.layers.{layer}."
            x = x + self.attention(layer, self.norm(x, f"{at}input_layernorm.weight"), switches, run)
            n = self.norm(x, f"{at}post_attention_layernorm.weight")
            gate, rise, down = (self.tensors[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = x + (torch.nn.functional.silu(n @ gate.T) * (n @ rise.T)) @ down.T
        logits = self.norm(x, "model.norm.weight") @ self.tensors["model.embed_tokens.weight"].T
        return Run(logits, run.weights, run.joined)

    def attention(self, layer: int, x: Tensor, switches: Switches, run: Run) -> Tensor:
        q, k, v, o = (self.tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkvo")
        k, v = (w.view(switches.kv, -1, self.dim, x.shape[1]).mean(1).flatten(0, 1) for w in (k, v))
        q_HTD, k_HTD, v_HTD = ((x @ w.T).view(len(x), -1, self.dim).transpose(0, 1) for w in (q, k, v))
        if switches.rotary:
            q_HTD, k_HTD = self.turned(q_HTD), self.turned(k_HTD)
        k_HTD, v_HTD = (y.repeat_interleave(self.heads // switches.kv, 0) for y in (k_HTD, v_HTD))
        scores = q_HTD @ k_HTD.transpose(1, 2) * (self.dim**-0.5 if switches.scaled else 1.0)
        if switches.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        weights = scores.softmax(-1)
        if layer in switches.onePattern:
            weights = weights.mean(0, keepdim=True).expand_as(weights)
        heads = weights @ v_HTD
        for off_layer, head in switches.off:
            if off_layer == layer:
                heads[head] = 0
        run.weights.append(weights)
        run.joined.append(heads.transpose(0, 1).flatten(1))
        return run.joined[-1] @ o.T


@functools.cache
def reference(dtype: torch.dtype = torch.float64) -> Reference:
    return Reference(dtype)


@functools.cache
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(models.tiny_path())


def default_ids() -> list[int]:
    return list(tokenizer()(models.default_text()).input_ids)


def each_loss(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Nats of each token but the first."""
    return torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]), reduction="none")


@functools.cache
def logits(ids: tuple[int, ...], switches: Switches = Switches(), dtype: torch.dtype = torch.float64) -> Tensor:
    """Of each token; computed once, because many claims are measured against the same few runs."""
    return reference(dtype)(ids, switches).logits


def loss(switches: Switches = Switches(), ids: Sequence[int] | None = None) -> float:
    ids = default_ids() if ids is None else ids
    return float(each_loss(logits(tuple(ids), switches), ids).mean())
