"""transformers models whose sequences are split over ranks against one process, in the processes of `ranks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from context_cases import off
from hf_models import BY_NAME, VOCAB
from torch import Tensor

import headwise.hf

LENGTH = 21
BATCHES = [("whole", "ring"), ("padded", "gather"), ("packed", "ulysses"), ("packed", "ring")]  # each with a layout
MODELS = (
    "Llama GQA",
    "GPT-2",
    "Mistral window",
    "Qwen3",
    "Gemma2 softcap",
    "Gemma3 text",
    "gpt-oss sinks",
    "Llama4 chunked",
)


def inputs(kind: str) -> dict[str, Tensor]:
    """A batch: whole, padded on the right, or of two documents packed in a row."""
    ids = torch.randint(1, VOCAB, (1 if kind == "packed" else 2, LENGTH), generator=torch.Generator().manual_seed(4))
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[1, 15:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "packed":
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(8), torch.arange(13)])[None], "labels": ids}
    return {"input_ids": ids, "labels": ids}


def train(name: str, kind: str, layout: Any) -> dict[str, float]:
    """What is off of loss, logits and the gradients of a model, as a part of the largest."""
    model = BY_NAME[name].build()
    model.set_attn_implementation("headwise")
    batch = inputs(kind)
    want = model(**batch, use_cache=False)
    want.loss.backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    with headwise.hf.context_parallel(model, layout=layout) as shards:
        out = model(**batch)
        out.loss.backward()
        logits = shards.join(out.logits.detach())
        shards.sum_gradients()
    errors = {"loss": off(out.loss.detach(), want.loss.detach())}
    errors["logits"] = off(logits, want.logits.detach())
    for (part, p), grad in zip(model.named_parameters(), expected, strict=True):
        errors[part] = off(p.grad, torch.zeros_like(p) if grad is None else grad)
    return errors


def train_all(name: str, batches: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[float, str]]:
    """The worst error of each kind of batch."""
    largest = {}
    for kind, layout in batches:
        errors = train(name, kind, layout)
        worst = max(errors, key=lambda part: errors[part])
        largest[kind, layout] = errors[worst], worst
    return largest
