"""Models of random shape with random weights, in which a detector of head roles must find nothing."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headwise.nn import MultiHeadAttention, Rotary
from headwise.ops.masks import Mask, causal
from headwise.shapes.arguments import check_counts


class RandomModel(nn.Module):
    """A transformer ``model(ids)`` that returns logits, with norms and optional feed-forward layers."""

    def __init__(self, facts: dict[str, Any]) -> None:
        super().__init__()
        self.facts = facts
        heads, kv_heads, D = facts["heads"], facts["kv_heads"], facts["head_dim"]
        width = heads * D
        self.mask: Mask | None = causal() if facts["causal"] else None
        self.embed = nn.Embedding(facts["vocabulary"], width)
        self.place = None if facts["rotary"] else nn.Embedding(facts["places"], width)
        norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[facts["norm"]]
        self.norms = nn.ModuleList(norm(width) for _ in range(facts["layers"]))
        self.layers = nn.ModuleList(
            MultiHeadAttention(
                width, heads, num_kv_heads=kv_heads, head_dim=D, rotary=Rotary(D) if facts["rotary"] else None
            )
            for _ in range(facts["layers"])
        )
        feed = (nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in self.layers)
        self.feeds = nn.ModuleList(feed if facts["feed"] else ())
        self.unembed = nn.Linear(width, facts["vocabulary"], bias=False)
        self.config = SimpleNamespace(
            vocab_size=facts["vocabulary"], max_position_embeddings=facts["places"], bos_token_id=1
        )
        with torch.no_grad():
            for part in self.layers.modules():
                if isinstance(part, MultiHeadAttention):
                    part.q_proj.weight.mul_(facts["sharpness"])

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.embed

    def get_output_embeddings(self) -> nn.Linear:
        """Return the unembedding."""
        return self.unembed

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T N"]:
        """Return logits (B, T, vocabulary) of ids (B, T)."""
        x = self.embed(ids)
        if self.place is not None:
            x = x + self.place(torch.arange(ids.shape[1], device=ids.device))
        for n, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = x + layer(norm(x), mask=self.mask)
            if self.feeds:
                x = x + self.feeds[n](x)
        return self.unembed(x)


def random_model(seed: int, *, places: int = 257) -> RandomModel:
    """Build a small transformer of random shape with random weights, the same for the same seed.

    It has one to three layers, one to six heads, optionally with shared keys, rotary or learned positions, LayerNorm or
    RMSNorm, and optionally feed-forward layers; three of four models are causal. Attention ranges from almost uniform
    to single keys. The global random state does not change. The drawn properties are in `facts`.

    >>> model = random_model(3)
    >>> model(torch.tensor([[1, 5, 7]])).shape[-1] == model.facts["vocabulary"]
    True
    """
    check_counts(0, seed=seed)
    check_counts(1, places=places)
    draw = random.Random(seed)
    heads = draw.choice((1, 2, 3, 4, 6))
    facts = {
        "heads": heads,
        "kv_heads": draw.choice([k for k in (1, 2, 3, 4, 6) if heads % k == 0]),
        "head_dim": draw.choice((4, 6, 8, 12)),
        "layers": draw.randint(1, 3),
        "vocabulary": draw.choice((53, 97, 211)),
        "places": places,
        "causal": draw.random() < 0.75,
        "rotary": draw.random() < 0.5,
        "norm": draw.choice(("layer", "rms")),
        "feed": draw.random() < 0.5,
        "sharpness": 2 ** draw.uniform(0, 5),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw.getrandbits(40))
        return RandomModel(facts).eval()
