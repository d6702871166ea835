"""A module and its heads: one fused projection is h small ones, and a head can be switched off."""

import torch

import headwise

torch.manual_seed(0)
mha = headwise.MultiHeadAttention(d_model=64, num_heads=8, num_kv_heads=2)
x = torch.randn(2, 5, 64)
out = mha(x, mask=headwise.causal())
print(mha)
print("shape in", tuple(x.shape), "equals shape out", tuple(out.shape))

head = mha.head(3)
print("head 3:", head)

gate = torch.ones(8)
gate[3] = 0
change = (out - mha(x, mask=headwise.causal(), gate=gate)).norm() / out.norm()
print(f"without head 3 the output changes by {change:.0%}")

rest = headwise.MultiHeadAttention.from_heads([mha.head(h) for h in range(8) if h != 3])
print("a module of the other seven:", rest)
assert torch.allclose(rest(x, mask=headwise.causal()), mha(x, mask=headwise.causal(), gate=gate), atol=1e-6)
