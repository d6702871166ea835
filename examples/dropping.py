"""A smaller cache: each head keeps the tokens that received the most attention, and generation goes on.

The prompt passes the packaged model once, under a probe. For every layer, `received` is the mass that each key got from
all queries, head by head. A head keeps the keys with the most of it, and the newest ones, which few queries could
attend yet. What follows is predicted from that cache: its loss, beside that of the whole cache and of caches that keep
as many tokens without looking. This is the policy of H2O (Zhang et al. 2023, arXiv 2306.14048); SnapKV (Li et al. 2024,
arXiv 2404.14469) differs in whose mass it counts: that of the last queries alone.
"""

import fractions
import inspect

import torch
import transformers

import headwise.hf
from headwise import models

PROMPT, TEXT, KEPT, NEWEST = 256, 384, 64, 16  # tokens: of the prompt, of all, kept by each head, newest among them

tiny = headwise.hf.load(models.tiny_path())
model, words = tiny.model, tiny.tokenizer
source = inspect.getsource(fractions)  # the model never saw it
ids = torch.stack([torch.tensor(words(source[n:]).input_ids[:TEXT]) for n in range(0, 12_000, 1_500)])
model.set_attn_implementation("headwise")


@torch.no_grad()
def prompted() -> tuple[transformers.Cache, list[torch.Tensor]]:
    """A cache that holds the prompts, and for each layer the mass (B, K, S) that its keys received."""
    cache, masses = headwise.hf.make_cache(model, max_length=TEXT), []
    with headwise.nn.probe(model) as seen:
        model(ids[:, :PROMPT], cache=cache)
    for call in seen.calls:
        received = headwise.statistics(call.query, call.key, **call.scoring).received  # (B, H, S)
        masses.append(received.unflatten(1, (call.key.shape[1], -1)).mean(2))  # the query heads of a key-value head
    return cache, masses


@torch.no_grad()
def loss(cache: transformers.Cache) -> float:
    """The loss of the tokens after the prompt, in nats, with what the cache still holds."""
    logits = model(ids[:, PROMPT:-1], cache=cache).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT + 1 :].flatten()).item()


def most_mass(mass: torch.Tensor) -> torch.Tensor:
    mass = mass.clone()
    mass[..., -NEWEST:] = torch.inf
    return mass.topk(KEPT).indices  # (B, K, KEPT): each head its own


policies = {
    "all tokens": lambda mass: torch.arange(PROMPT),
    "most mass received, by head": most_mass,
    "the newest": lambda mass: torch.arange(PROMPT - KEPT, PROMPT),
    "the first 4 and the newest": lambda mass: torch.cat([torch.arange(4), torch.arange(PROMPT - KEPT + 4, PROMPT)]),
    "at random": lambda mass: torch.randperm(PROMPT)[:KEPT],
}
torch.manual_seed(0)
losses = {}
for name, chosen in policies.items():
    cache, masses = prompted()
    for layer, mass in zip(cache.layers, masses, strict=True):
        layer.cache.keep(chosen(mass))
    kept = layer.cache.columns[0]
    losses[name] = loss(cache)
    print(f"{name:28} {kept:4} of {PROMPT} tokens, loss of the next {TEXT - PROMPT - 1}: {losses[name]:.3f}")
    assert layer.cache.lengths == [TEXT - 1] * len(ids), "positions go on after the dropped tokens"
assert losses["all tokens"] < losses["most mass received, by head"] < losses["the newest"]
