"""YaRN's frequencies and scale, counted by hand: which pairs turn how often within the length of training.

And frequencies of one's own in decode steps.
"""

import math
import random

import pytest
import torch
from step_watch import taken_steps

import headwise
from headwise.cache import StaticCache
from headwise.nn import Rotary, yarn_frequencies, yarn_scale


def counted(
    dim: int, factor: float, length: int, base: float, fast: float, slow: float
) -> tuple[list[float], tuple[int, int]]:
    """The frequencies by turns alone, without a logarithm: pairs are tried one after another, beyond both ends, too."""

    def turns(pair: int) -> float:
        return length / (2 * math.pi) * base ** (-2 * pair / dim)

    tried = range(-20 * dim, 20 * dim)
    first = max((pair for pair in tried if turns(pair) >= fast), default=tried[0])
    last = min((pair for pair in tried if turns(pair) <= slow), default=tried[-1])
    first, last = max(first, 0), min(last, dim - 1)
    frequencies = []
    for pair in range(dim // 2):
        own = base ** (-2 * pair / dim)
        share = float(pair > first) if first == last else min(max((pair - first) / (last - first), 0), 1)
        frequencies.append((1 - share) * own + share * own / factor)
    return frequencies, (first, last)


def test_frequencies_are_those_of_counted_turns() -> None:
    rng, ends = random.Random(7), set()
    for _ in range(120):
        dim, factor = 2 * rng.choice([1, 3, 7, 11, 32]), rng.choice([1.0, 1.7, 5.0, 40.0])
        length, base = rng.choice([13, 510, 4096, 131072]), rng.choice([17.0, 10000.0, 500000.0])
        fast, slow = rng.choice([(32.0, 1.0), (7.3, 2.1), (3.0, 3.0), (64.0, 0.01)])
        expected, (first, last) = counted(dim, factor, length, base, fast, slow)
        ours = yarn_frequencies(dim, factor=factor, original_length=length, base=base, beta_fast=fast, beta_slow=slow)
        assert ours == pytest.approx(expected, rel=1e-9), (dim, factor, length, base, fast, slow)
        # Where the mixing begins and ends, so that every end is known to have been met.
        ends |= {
            ("begins", first == 0),
            ("ends among the pairs", last < dim // 2),
            ("ends behind all", last == dim - 1),
        }
        ends |= {("ends behind the pairs", dim // 2 <= last < dim - 1)}
    assert len(ends) == 8


def test_defaults_are_those_of_the_paper() -> None:
    given = yarn_frequencies(22, factor=3.0, original_length=700, base=10000.0, beta_fast=32.0, beta_slow=1.0)
    assert yarn_frequencies(22, factor=3.0, original_length=700) == given


@pytest.mark.parametrize(
    "factor, mscale, stretch",
    [(math.e**10, 1.0, 2.0), (math.e**5, 3.0, 2.5), (0.5, 1.0, 1.0), (1.0, 7.0, 1.0), (math.e, 0.0, 1.0)],
)
def test_the_scale_grows_by_the_square_of_the_stretch(factor: float, mscale: float, stretch: float) -> None:
    assert yarn_scale(13, factor=factor, mscale=mscale) == pytest.approx(stretch**2 / math.sqrt(13), rel=1e-12)
    assert yarn_scale(13, factor=factor) == yarn_scale(13, factor=factor, mscale=1.0)


@pytest.mark.parametrize("latent", [False, True], ids=["heads", "latent"])
@torch.no_grad()
def test_decode_steps_turn_by_frequencies_of_ones_own(latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, as in one pass over the whole text; two modules step in turn, each with its own frequencies."""
    texts, modules, caches = torch.randn(2, 3, 13, 29), [], []
    for factor in (5.0, 40.0):
        frequencies = yarn_frequencies(6, factor=factor, original_length=7)
        rotary = Rotary(6, frequencies=frequencies, interleaved=latent)
        if latent:
            sizes = {"kv_lora_rank": 11, "nope_dim": 5, "rope_dim": 6, "value_dim": 7}
            modules.append(headwise.LatentAttention(29, 3, rotary=rotary, **sizes))
            caches.append(StaticCache(3, 1, 17, 11, capacity=13, shared=True))
        else:
            modules.append(headwise.MultiHeadAttention(29, 4, num_kv_heads=2, head_dim=6, rotary=rotary))
            caches.append(StaticCache(3, 2, 6, capacity=13))
    how = {"form": "absorbed"} if latent else {}
    taken, outs = taken_steps(monkeypatch), ([], [])
    for i in range(13):
        for module, cache, x, out in zip(modules, caches, texts, outs, strict=True):
            out.append(module(x[:, i : i + 1], cache=cache, **how)[0])
    assert not headwise.ops.native.library.isas() or taken == [True] * 26
    for module, x, out in zip(modules, texts, outs, strict=True):
        whole = module(x, mask=headwise.causal(), **how)
        torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
