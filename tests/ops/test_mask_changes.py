"""A mask means what its tensors hold at the call: whatever changed since it was used last, by whatever way.

Every kind of mask is used, its tensors change, and it is used again: the result is that of a mask made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from draw import drawn
from loops import inside
from native_cases import collected
from torch import Tensor, nn

import headwise
from headwise import Mask, attention, bias, blocks, causal, dilated, keep, lengths, prefix, rule, segments, window
from headwise.cache import StaticCache
from headwise.ops.masks import tiles
from headwise.ops.masks.rule import Rule
from headwise.ops.sharding.masks import share_of_mask
from headwise.testing import assert_same_bits, make_qkv

B, H, K, T, S = 2, 4, 2, 67, 131
original = tiles.built_map
Q, KEY, V = make_qkv(B, H, K, T, S, 16, 8)
Make = Callable[[Tensor], Mask]


def _ids(step: int, n: int = S) -> Tensor:
    return torch.arange(n) // step


# name -> (what the tensor holds at first, what it holds later, the mask of it)
KINDS: dict[str, tuple[Tensor, Tensor, Make]] = {
    "segments": (_ids(60), _ids(25), lambda x: segments(x[:T], x)),
    "segments | prefix": (_ids(60), _ids(25), lambda x: segments(x[:T], x) | prefix(2)),
    "causal & ~segments": (_ids(60), _ids(25), lambda x: causal() & ~segments(x[:T], x)),
    "rule": (_ids(60), _ids(25), lambda x: rule(lambda b, h, i, j: x[i] == x[j])),
    "rule | window": (_ids(60), _ids(25), lambda x: rule(lambda b, h, i, j: x[i] == x[j]) & causal() | window(3)),
    "lengths": (torch.tensor([20, 30]), torch.tensor([131, 90]), lambda x: lengths(x)),
    "~lengths": (torch.tensor([20, 30]), torch.tensor([100, 90]), lambda x: ~lengths(x)),
    "start | causal": (torch.tensor([20, 30]), torch.tensor([100, 90]), lambda x: lengths(x + S, x) | causal()),
    "causal | prefix": (torch.tensor([2, 3]), torch.tensor([100, 90]), lambda x: causal() | prefix(x)),
    "causal, placed": (torch.tensor([2, 3]), torch.tensor([50, 64]), lambda x: causal(offset=x)),
    "window | dilated": (torch.tensor([2, 3]), torch.tensor([50, 64]), lambda x: window(3, offset=x) | dilated(9)),
    "dilated": (torch.tensor([2, 3]), torch.tensor([50, 65]), lambda x: dilated(5, offset=x)),
    "blocks": (torch.tensor([2, 3]), torch.tensor([50, 65]), lambda x: blocks(20, offset=x)),
    "~blocks": (torch.tensor([2, 3]), torch.tensor([50, 65]), lambda x: ~blocks(20, offset=x)),
    "keep": (torch.eye(T, S).bool(), torch.ones(T, S).bool(), lambda x: keep(x)),
    "keep | causal": (torch.zeros(T, S).bool(), torch.ones(T, S).tril(90).bool(), lambda x: keep(x) | causal()),
    "bias": (torch.zeros(T, S), torch.linspace(-3, 3, T * S).view(T, S), lambda x: bias(x)),
    "alibi": (torch.rand(H), 3 * torch.rand(H) + 1, lambda x: headwise.alibi(x)),
    "relative": (torch.rand(H, 9), 3 * torch.rand(H, 9), lambda x: headwise.relative(x)),
}  # fmt: skip


class Held(nn.Module):
    """A tensor as a buffer, and memory shared with NumPy."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.register_buffer("x", torch.from_numpy(x.numpy().copy()))
        self.x: Tensor


def _by_item(module: Held, new: Tensor) -> None:
    for n in range(len(new)):
        module.x[n] = new[n]


def _shared(module: Held, new: Tensor) -> None:
    np.copyto(module.x.numpy(), new.numpy())


def _other_memory(module: Held, new: Tensor) -> None:
    module.x.data = new.clone()


CHANGES: dict[str, Callable[[Held, Tensor], Any]] = {
    "copy_": lambda module, new: module.x.copy_(new),
    "index assignment": _by_item,
    "load_state_dict": lambda module, new: module.load_state_dict({"x": new}),
    "data": lambda module, new: module.x.data.copy_(new),
    "NumPy": _shared,
    "other memory": _other_memory,
}


def _train(mask: Mask) -> tuple[Tensor, ...]:
    query = Q.clone().requires_grad_()
    return torch.autograd.grad(attention(query, KEY, V, mask=mask).sum(), query)


def _share(mask: Mask) -> Tensor:
    return attention(Q[:, 2:], KEY[:, 1:], V[:, 1:], mask=share_of_mask(mask, (0, B), (2, 4)))


PATHS: dict[str, Callable[[Mask], Any]] = {
    "forward": lambda mask: attention(Q, KEY, V, mask=mask),
    "gradient": _train,
    "statistics": lambda mask: tuple(
        x for x in vars(headwise.statistics(Q, KEY, mask=mask)).values() if isinstance(x, Tensor)
    ),
    "weights": lambda mask: headwise.weights(Q, KEY, mask=mask),
    "share": _share,
    "blocks": lambda mask: attention(Q, KEY, V, mask=mask, backend="blocks"),
    "flex": lambda mask: attention(Q, KEY, V, mask=mask, backend="flex"),
}


def _same(ours: Any, wanted: Any) -> None:
    for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, wanted)), strict=True):
        assert_same_bits(x, y)


MET = [(way, "forward") for way in CHANGES] + [("copy_", path) for path in PATHS if path != "forward"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_used_again_means_what_its_tensors_hold(kind: str) -> None:
    first, later, make = KINDS[kind]

    def check(way: str, path: str) -> None:
        module, run = Held(first), PATHS[path]
        mask = make(module.x)
        before = run(mask)
        CHANGES[way](module, later)
        after = run(mask)
        _same(after, run(make(later.clone())))
        with pytest.raises(AssertionError):
            _same(after, before)

    with collected() as attempt:
        for way, path in drawn(MET, kind):  # for each kind another way or path
            if way != "other memory" or "segments" not in kind:  # these have a view of the memory that was there
                attempt((way, path), check, way, path)


@dataclass
class Config:
    """A plain object that a function reads."""

    ids: Any
    n: int = 3


class Owned(Rule):
    """A rule of one's own that reads whatever it likes."""

    def __init__(self, config: Config) -> None:
        object.__setattr__(self, "config", config)

    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        config: Config = vars(self)["config"]
        return config.ids[i] == config.ids[j] if config.n < 10 else j >= config.n


READERS: dict[str, Callable[[Config], Mask]] = {
    "attribute": lambda c: rule(lambda b, h, i, j: c.ids[i] == c.ids[j]),
    "number": lambda c: rule(lambda b, h, i, j: (j - i) % c.n == 0),
    "branch": lambda c: rule(lambda b, h, i, j: j <= i if c.n < 10 else j >= i),
    "part": lambda c: rule(lambda b, h, i, j: c.ids[c.n :][i % 40] == 0),
    "item": lambda c: rule(lambda b, h, i, j: j < c.ids[100].item()),
    "list": lambda c: rule(lambda b, h, i, j: torch.tensor(c.ids.tolist())[i] == c.ids[j]),
    "number of a list": lambda c: rule(lambda b, h, i, j: j < sum(c.ids.tolist())),
    "NumPy": lambda c: rule(lambda b, h, i, j: torch.from_numpy(c.ids.numpy()[j.numpy()] % 2 == 0)),
    "result": lambda c: rule(lambda b, h, i, j: (c.ids % 2 == 0)[None, None, None, :]),
    "partial": lambda c: rule(partial(lambda c, b, h, i, j: c.ids[i] == c.ids[j], c)),
    "beside others": lambda c: ~(rule(lambda b, h, i, j: c.ids[i] == c.ids[j]) | prefix(3)),
    "own rule": lambda c: Mask((Owned(c),)),
    "not an own rule": lambda c: ~Mask((Owned(c),)),
    "part of a mask": lambda c: rule(lambda b, h, i, j: c.ids[i] == c.ids[j]).part((0, T), (0, S), T, S),
    "share": lambda c: share_of_mask(rule(lambda b, h, i, j: c.ids[i] == c.ids[j]), (0, B), (0, H)),
}


def _rebound(config: Config) -> None:
    config.ids, config.n = _ids(25), 30


def _in_place(config: Config) -> None:
    config.ids.copy_(_ids(25))
    config.n = 30


@pytest.mark.parametrize("reader", READERS)
@inside("change", [_rebound, _in_place])
def test_a_function_used_again_means_what_it_reads(reader: str, change: Callable[[Config], None]) -> None:
    config = Config(_ids(60))
    mask, before = READERS[reader](config), attention(Q, KEY, V, mask=READERS[reader](config))
    for _ in range(2):
        _same(attention(Q, KEY, V, mask=mask), before)
    change(config)
    after = attention(Q, KEY, V, mask=mask)
    _same(after, attention(Q, KEY, V, mask=READERS[reader](config)))
    with pytest.raises(AssertionError):
        _same(after, before)


def test_what_is_unchanged_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where tensors were written with what they already contained; not where a function makes what it reads."""
    built: list[int] = []
    monkeypatch.setattr(tiles, "built_map", lambda *args: built.append(1) or original(*args))
    config = Config(_ids(60))
    for name, times in (("attribute", 1), ("beside others", 1), ("own rule", 1), ("number of a list", 1), ("list", 4)):
        mask = READERS[name](config)
        built.clear()
        for _ in range(4):
            attention(Q, KEY, V, mask=mask)
            config.ids.copy_(config.ids.clone())
        assert len(built) == times, name
    for first, _, make in KINDS.values():
        mask = make(first)
        built.clear()
        for _ in range(3):
            attention(Q, KEY, V, mask=mask)
        assert len(built) <= 1


def test_what_is_to_be_kept_is_evaluated_once() -> None:
    config, calls = Config(_ids(60)), []
    mask = rule(lambda b, h, i, j: calls.append(1) or config.ids[i] == config.ids[j], keep=True)
    before = attention(Q, KEY, V, mask=mask)
    config.ids.copy_(_ids(25))
    _same(attention(Q, KEY, V, mask=mask), before)
    assert calls == [1]
    part = mask.part((0, T), (0, S), T, S)
    _same(attention(Q, KEY, V, mask=part), attention(Q, KEY, V, mask=part))
    assert calls == [1, 1]
    with pytest.raises(TypeError, match="keep"):
        rule(lambda b, h, i, j: i >= j, keep="yes")  # type: ignore[arg-type]


@inside("inference", [False, True])
def test_decode_steps_and_modules_mean_what_the_tensors_hold(inference: bool) -> None:
    """A module's steps over a cache, whose mask's tensor changes between steps of the same size, as a batch's does."""
    torch.manual_seed(3)
    mha = headwise.MultiHeadAttention(24, 4, num_kv_heads=2).eval()
    x = torch.randn(2, 4, 24)
    with torch.inference_mode() if inference else torch.no_grad():
        start = torch.tensor([1, 2])
        for make in (
            lambda t: causal() | prefix(t),
            lambda t: ~lengths(t),
            lambda t: rule(lambda b, h, i, j: j >= t[b]),
        ):
            start.copy_(torch.tensor([1, 2]))
            mask = make(start)
            for values in ([1, 2], [3, 1], [0, 2]):
                start.copy_(torch.tensor(values))
                outs = []
                for used in (mask, make(torch.tensor(values))):
                    cache = StaticCache(2, 2, 6, capacity=4)
                    outs.append(torch.cat([mha(x[:, t : t + 1], cache=cache, mask=used)[0] for t in range(4)], 1))
                _same(*outs)
