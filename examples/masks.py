"""Masks, drawn. A filled square may be attended, a dot may not; a bias shows its number."""

import torch

from headwise import alibi, causal, causal_top_left, lengths, segments, window

drawings = {
    "causal(): the last query sees the last key": (causal(), 3, 5),
    "causal_top_left(): as PyTorch's is_causal": (causal_top_left(), 3, 5),
    "window(2): two keys, self included": (window(2), 5, 5),
    "window(2, 1): and one key after self": (window(2, 1), 5, 5),
    "causal() & lengths([3]): the last two keys are padding": (causal() & lengths(torch.tensor([3])), 5, 5),
    "causal() & segments: two packed documents": (causal() & segments(torch.tensor([0, 0, 0, 1, 1])), 5, 5),
    "causal() & alibi(0.5): nearer keys count more": (causal() & alibi(torch.tensor([0.5])), 4, 4),
}
for title, (mask, queries, keys) in drawings.items():
    print(f"{title}\n{mask.draw(queries, keys)}\n")
