"""A serving loop of our own: requests join and leave a batch, and their keys lie in pages of one pool.

Each layer of the packaged model has a `PagedCache` with a row for each place in the batch. A step gives every row its
new tokens: a prompt where a request joins, one token where it goes on, none where the place is empty. A request that
leaves gives its pages back, and the next takes its place. Every answer is that of `generate` on its prompt alone.
"""

import torch

import headwise.hf
from headwise import models
from headwise.cache import PagedCache, PagePool

PLACES = 3  # requests at a time

tiny = headwise.hf.load(models.tiny_path())
model, config, words = tiny.model.model, tiny.model.config, tiny.tokenizer
rotary = headwise.nn.Rotary(config.head_dim, base=config.rope_parameters["rope_theta"])
pools = [PagePool(8, config.num_key_value_heads, config.head_dim) for _ in model.layers]
caches = [PagedCache(pool, PLACES) for pool in pools]


def attend(attention: torch.nn.Module, cache: PagedCache, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Attention of the new tokens x (B, T, M) to all tokens of their rows; counts[b] of the T are real in row b."""
    q, k, v = (
        part(x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    positions = torch.tensor(cache.lengths)[:, None] + torch.arange(x.shape[1])
    q, k = rotary(q, k, positions)
    out = headwise.attention(q, cache.append(k, v, lengths=counts))
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def step(new: list[list[int]]) -> list[int]:
    """The next token of each row after its new ones; of a row without new tokens it means nothing."""
    counts = [len(tokens) for tokens in new]
    padded = torch.tensor([tokens + [0] * (max(counts) - len(tokens)) for tokens in new])
    x = model.embed_tokens(padded)
    for layer, cache in zip(model.layers, caches, strict=True):
        x = x + attend(layer.self_attn, cache, layer.input_layernorm(x), counts)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    last = x[torch.arange(PLACES), torch.tensor(counts).clamp(min=1) - 1]
    return tiny.model.lm_head(model.norm(last)).argmax(-1).tolist()


requests = {"def read_": 9, "for line in": 4, "class Cache": 14, "import os\n": 7, "return self.": 5}  # most new tokens
prompts, most = [words(text).input_ids for text in requests], list(requests.values())
waiting, answers = list(range(len(prompts))), [[] for _ in prompts]
places: list[int | None] = [None] * PLACES  # the request in each place

with torch.no_grad():
    while waiting or any(request is not None for request in places):
        places = [waiting.pop(0) if request is None and waiting else request for request in places]
        new = [[] if request is None else answers[request][-1:] or prompts[request] for request in places]
        print(f"requests {places}, new tokens {[len(tokens) for tokens in new]}, pages {8 - pools[0].free}")
        for place, (request, token) in enumerate(zip(places, step(new), strict=True)):
            if request is not None:
                answers[request].append(token)
                if token == config.eos_token_id or len(answers[request]) == most[request]:
                    places[place] = None
        kept = [0 if request is None else n for n, request in zip(caches[0].lengths, places, strict=True)]
        for cache in caches:
            cache.truncate(kept)

    for prompt, n, answer in zip(prompts, most, answers, strict=True):
        ids = torch.tensor([prompt])
        how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        alone = tiny.model.generate(ids, **how)
        assert answer == alone[0, len(prompt) :].tolist(), "other tokens than alone"
        print(repr(words.decode(prompt + answer)))
