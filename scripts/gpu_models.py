"""The cases of `scripts/gpu.py` that run whole transformers models, with random weights: `look`, and decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from gpu_cases import Case, Run, Sizes, graphed

from headwise import look


def cases(sizes: Sizes) -> Iterator[Case]:
    """A look at a model of GPT-2's sizes beside its forward pass, and steps of a Llama of 155 M parameters."""
    small = sizes.divisor > 1
    heads, dim, layers = (sizes.H, sizes.D, 2) if small else (12, 64, 12)
    for n in (2048 // sizes.divisor, 8192 // sizes.divisor):
        width, pairs = heads * dim, n * n // 2
        weights = 12 * layers * width * width
        flops = 2 * weights * n + layers * 4 * width * pairs
        yield Case(f"look at {n} tokens", weights * sizes.dtype.itemsize, flops, _look(sizes, heads, dim, layers, n))
    heads, layers = (sizes.H, 2) if small else (16, 8)
    n, width = 2048 // sizes.divisor, heads * 64
    weights = (2 * width * (width + width // 4) + 12 * width * width) * layers
    held = weights * sizes.dtype.itemsize
    yield Case(f"step of a model, {n} tokens", held, 2 * weights, _steps(sizes, heads, layers, n))


def _look(sizes: Sizes, heads: int, dim: int, layers: int, n: int) -> dict[str, Callable[[], Run]]:
    def made(attention: str) -> tuple[Any, Any]:
        from transformers import GPT2Config, GPT2LMHeadModel

        import headwise.hf  # noqa: F401 - `look` then takes transformers models

        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(vocab_size=1024, n_positions=n, n_embd=heads * dim, n_head=heads, n_layer=layers, **ends)
        model = GPT2LMHeadModel._from_config(config, attn_implementation=attention).to("cuda", sizes.dtype).eval()
        return model, torch.arange(n) % 1000 + 3

    def forward(attention: str, **options: Any) -> Run:
        model, ids = made(attention)
        row = ids[None].to("cuda")
        return lambda: model(row, use_cache=False, **options)

    def looked(full_maps: bool) -> Run:
        model, ids = made("headwise")
        return lambda: look.at(model, ids, repeats=None, full_maps=full_maps)

    return {
        "headwise": partial(looked, False),
        "headwise, large maps": partial(looked, True),
        "sdpa forward": partial(forward, "sdpa"),
        "eager, whole matrices": partial(forward, "eager", output_attentions=True),
    }


def _steps(sizes: Sizes, heads: int, layers: int, n: int) -> dict[str, Callable[[], Run]]:
    def step(attention: str) -> Run:
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

        from headwise.hf import make_cache
        from headwise.hf.models.architectures import CACHE

        config = LlamaConfig(
            vocab_size=1024,
            hidden_size=heads * 64,
            intermediate_size=4 * heads * 64,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4,
            max_position_embeddings=2 * n + 64,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention).to("cuda", sizes.dtype).eval()
        cache: Any = make_cache(model, max_length=n + 8) if attention == "headwise" else DynamicCache(config=config)
        model(torch.arange(n, device="cuda")[None] % 1000, **{CACHE: cache})
        token = torch.tensor([[5]], device="cuda")

        def run() -> None:
            model(token, **{CACHE: cache})
            cache.crop(-1)

        return run

    return {
        "headwise": partial(step, "headwise"),
        "sdpa": partial(step, "sdpa"),
        "headwise, graph": lambda: graphed(step("headwise")),
        "sdpa, graph": lambda: graphed(step("sdpa")),
    }
