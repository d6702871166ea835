"""Attention in twelve lines: grouped queries, a causal window, and a look at one row of the weights."""

import torch

import headwise

query = torch.randn(2, 8, 5, 16)  # (B, H, T, D): 8 query heads, 5 queries
key = torch.randn(2, 2, 7, 16)  # (B, K, S, D): 2 key-value heads, 7 keys
value = torch.randn(2, 2, 7, 16)  # (B, K, S, V)
mask = headwise.causal() & headwise.window(4)

out = headwise.attention(query, key, value, mask=mask)
print("out", tuple(out.shape))

last_row = headwise.weights(query, key, rows=[-1], heads=[0], mask=mask)[0, 0, 0]
print("what head 0 gives to each key in the last row:", [round(w, 2) for w in last_row.tolist()])
print(headwise.explain(query, key, value, mask=mask))
