"""Ways to call attention, and places to call it in: what `test_first_call.py` runs first in a fresh process."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoints

import headwise
from headwise import cache

Run = Callable[[Tensor], Tensor]
N, T, D, M = 2, 7, 8, 24  # heads, tokens, width of a head, width of the model


def _op(**options: Any) -> Run:
    def run(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, D)).unbind(-2)
        return headwise.attention(q, k, v, **{name: x() if callable(x) else x for name, x in options.items()})

    return run


def _statistics(x: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, D)).unbind(-2)
    out, rows = headwise.attention_statistics(q, k, v, mask=headwise.causal())
    return out + rows.entropy[..., None].detach()


def _module(make: Callable[[], torch.nn.Module], **options: Any) -> Run:
    """A module of width M; `x` is cut to it."""
    torch.manual_seed(7)
    module = make()
    return lambda x: module(x.flatten(0, 1)[..., :M], **options)


def _mha() -> torch.nn.Module:
    return headwise.MultiHeadAttention(M, 3, num_kv_heads=1, rotary=headwise.nn.Rotary(D))


def _latent() -> torch.nn.Module:
    return headwise.LatentAttention(M, 3, kv_lora_rank=16, nope_dim=8, rope_dim=4, value_dim=8)


def _cached(kind: str) -> Run:
    def run(x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, D)).unbind(-2)
        makers: dict[str, Callable[[], Any]] = {
            "static": lambda: cache.StaticCache(len(k), N, D, capacity=T),
            "int8": lambda: cache.StaticCache(len(k), N, D, capacity=T, dtype=torch.int8),
            "rolling": lambda: cache.RollingCache(len(k), N, D, window=5),
            "paged": lambda: cache.PagedCache(cache.PagePool(len(k) + 1, N, D), len(k)),
        }
        with torch.no_grad():
            return makers[kind]().append(k, v).attend(q)

    return run


def _decode() -> Run:
    """A prompt and two decode steps of a module."""
    torch.manual_seed(7)
    module = _mha().eval()

    def run(x: Tensor) -> Tensor:
        x = x.flatten(0, 1)[..., :M]
        kept = cache.StaticCache(len(x), 1, D, capacity=T)
        with torch.no_grad():
            outs = [module(part, cache=kept)[0] for part in x.split([T - 2, 1, 1], dim=1)]
        return torch.cat(outs, 1)

    return run


def _llama() -> Run:
    import transformers

    import headwise.hf  # noqa: F401

    torch.manual_seed(7)
    sizes = {"hidden_size": M, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=11, num_hidden_layers=1, head_dim=8, **sizes)
    model = transformers.LlamaModel._from_config(config, attn_implementation="headwise")
    return lambda x: model(inputs_embeds=x.flatten(0, 1)[..., :M]).last_hidden_state


# Each makes what is to be called; making it calls no attention.
WAYS: dict[str, Callable[[], Run]] = {
    "plain": lambda: _op(),
    "causal": lambda: _op(mask=headwise.causal),
    "window and lengths": lambda: _op(mask=lambda: headwise.window(3) & headwise.lengths(torch.tensor([5, 7]))),
    "segments": lambda: _op(mask=lambda: headwise.segments(torch.arange(T) // 3)),
    "rule": lambda: _op(mask=lambda: headwise.rule(lambda b, h, i, j: (i + j) % 3 != 1)),
    "bool tensor": lambda: _op(mask=lambda: torch.ones(T, T).tril().bool()),
    "bias": lambda: _op(mask=lambda: headwise.bias(torch.linspace(0, 1, T * T).reshape(T, T))),
    "alibi": lambda: _op(mask=lambda: headwise.causal() & headwise.alibi(torch.tensor([0.5, 0.25]))),
    "softcap": lambda: _op(softcap=5.0),
    "sinks": lambda: _op(sinks=lambda: torch.tensor([0.5, -1.0])),
    "gate": lambda: _op(gate=lambda: torch.tensor([0.5, 2.0])),
    "scale": lambda: _op(scale=0.25),
    "sdpa": lambda: _op(mask=headwise.causal, backend="sdpa"),
    "blocks": lambda: _op(mask=headwise.causal, backend="blocks"),
    "reference": lambda: _op(mask=headwise.causal, backend="reference"),
    "statistics": lambda: _statistics,
    "static cache": lambda: _cached("static"),
    "int8 cache": lambda: _cached("int8"),
    "rolling cache": lambda: _cached("rolling"),
    "paged cache": lambda: _cached("paged"),
    "decode steps": _decode,
    "multi-head": lambda: _module(_mha, mask=headwise.causal()),
    "latent": lambda: _module(_latent, mask=headwise.causal()),
    "transformers": _llama,
}
WITHOUT_GRADIENT = {name for name in WAYS if "cache" in name or name in ("decode steps", "statistics")}
WITHOUT_TRACE = WITHOUT_GRADIENT | {"transformers"}  # compiled and exported in tests of their own


def plain(run: Run, x: Tensor) -> Tensor:
    return run(x)


def checkpointed(run: Run, x: Tensor) -> Tensor:
    return checkpoints.checkpoint(run, x, use_reentrant=False)


def reentrant(run: Run, x: Tensor) -> Tensor:
    return checkpoints.checkpoint(run, x, use_reentrant=True)


def selective(run: Run, x: Tensor) -> Tensor:
    """Products of matrices are kept, all else is computed again."""
    keep = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]
    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, keep)
    return checkpoints.checkpoint(run, x, use_reentrant=False, context_fn=contexts)


def compiled(run: Run, x: Tensor) -> Tensor:
    return torch.compile(run, backend="eager")(x)


def exported(run: Run, x: Tensor) -> Tensor:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return run(x)

    return torch.export.export(Module(), (x,), strict=False).module()(x)


def mapped(run: Run, x: Tensor) -> Tensor:
    return torch.vmap(run)(x[None])[0]


def in_a_thread(run: Run, x: Tensor) -> Tensor:
    """Two at once, each the first."""
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(run(x))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(*results)
    return results[0]


def in_a_fork(run: Run, x: Tensor) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "result")
        if (child := os.fork()) == 0:
            try:
                torch.save(run(x.detach()), file)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        result: Tensor = torch.load(file)
    return result


PLACES = {
    place.__name__: place
    for place in (plain, checkpointed, reentrant, selective, compiled, exported, mapped, in_a_thread, in_a_fork)
}


def fits(way: str, place: str) -> bool:
    """Return whether there is such a call at all."""
    if place in ("checkpointed", "reentrant", "selective"):
        return way not in WITHOUT_GRADIENT
    return place not in ("compiled", "exported", "mapped") or way not in WITHOUT_TRACE | {"sdpa"}


def path_of(place: Callable[[Run, Tensor], Tensor], run: Run, learns: bool) -> tuple[Tensor, list[Any], Tensor | None]:
    """Call it; return the result, the autograd node with the tensors that it saves, and the gradient."""
    x = torch.randn(2, N, T, 3 * D, generator=torch.Generator().manual_seed(3)).requires_grad_(learns)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.shape, t.dtype)) or t, lambda t: t):
        out = place(run, x)
    nodes = [saved, type(out.grad_fn).__name__] if place is plain else []
    if not learns:
        return out.detach(), nodes, None
    out.square().sum().backward()
    return out.detach(), nodes, x.grad


def compare(way: str, place: str) -> None:
    """Compare the first call of this process with a second and with a plain call."""
    torch.manual_seed(0)
    run, where = WAYS[way](), PLACES[place]
    learns = way not in WITHOUT_GRADIENT and where not in (in_a_fork, exported, mapped)
    first, second, usual = (path_of(there, run, learns) for there in (where, where, plain))
    traced = where in (compiled, exported, mapped)  # which may choose other operators than an eager call
    for mine, its, same in ((first, second, True), (first, usual, not traced)):
        for x, y in ((mine[0], its[0]), (mine[2], its[2])):
            if x is not None and y is not None:
                assert torch.equal(x, y) if same else torch.allclose(x, y, rtol=1e-4, atol=1e-5), f"{way}, {place}"
    assert first[1] == second[1], f"{way}, {place}: {first[1]}, then {second[1]}"


if __name__ == "__main__":
    compare(*sys.argv[1:])
