"""A transformers model on headwise's attention, and every attention call of it seen from outside.

The model is small and random, so that nothing has to be downloaded; a trained one works the same.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import headwise.hf  # registers attn_implementation="headwise"

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
ids = torch.randint(97, (1, 11))

with torch.no_grad():
    eager = model(ids).logits
    model.set_attn_implementation("headwise")
    ours = model(ids).logits
    print("largest difference of logits from eager:", f"{(ours - eager).abs().max():.1e}")

    with headwise.hf.probe(model) as probe:
        model(ids)
for call in probe.calls:
    print(call.module, "query", tuple(call.query.shape), "key", tuple(call.key.shape), "mask", call.mask)
