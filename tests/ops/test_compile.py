"""The op inside torch's machinery: compile in one graph, export, autocast, meta and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from compiled_op import BUILT
from mask_cases import SHORT, Sizes
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise
from headwise.ops.native.library import error_for
from headwise.testing import assert_same_bits, make_qkv

pytestmark = pytest.mark.slow


def test_the_op_compiles_and_exports() -> None:
    """The tests of compiled_op.py, in a process without the shape checker."""
    ran = fresh.run_unchecked("compiled_op.py")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr[-1000:]


def both(left: Any, right: Any) -> zip[tuple[Tensor, Tensor]]:
    """The outputs of two calls side by side, whether or not the lse is among them."""
    return zip(*(x if isinstance(x, tuple) else (x,) for x in (left, right)), strict=True)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"mask": headwise.causal(), "return_lse": True}])
def test_autocast_is_the_op_in_lower_precision(options: dict[str, Any]) -> None:
    qkv = make_qkv(*SHORT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = headwise.attention(*qkv, **options)
    plain = headwise.attention(*(x.bfloat16() for x in qkv), **options)
    for x, y in both(ours, plain):
        assert_same_bits(x, y)


def test_autocast_takes_mixed_inputs_and_leaves_doubles_alone() -> None:
    """A linear layer under autocast hands over bfloat16 beside the float32 of a norm."""
    q, k, v = make_qkv(*SHORT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert headwise.attention(q, k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16
        assert headwise.attention(q.double(), k.double(), v.double()).dtype == torch.float64
    with pytest.raises(ValueError, match="share one dtype"):
        headwise.attention(q, k.bfloat16(), v.bfloat16())


def test_autocast_takes_mixed_inputs_to_scores_and_statistics() -> None:
    """Rotary positions leave queries and keys in float32 beside values of a half dtype: a look reads what runs."""
    low = tuple(x.bfloat16() for x in make_qkv(*SHORT))

    def numbers(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, rows = headwise.attention_statistics(q, k, v, mask=headwise.causal())
        fields = [*vars(rows).values(), *vars(headwise.statistics(q, k)).values(), *headwise.top_keys(q, k, 3)]
        return [out, headwise.weights(q, k), *(x for x in fields if isinstance(x, Tensor))]

    outside = numbers(*low)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for which in range(3):
            mixed = numbers(*(x.float() if n == which else x for n, x in enumerate(low)))
            for x, y in zip(mixed, outside, strict=True):
                assert_same_bits(x, y)


def test_autocast_gives_gradients_in_the_leaves_own_dtype() -> None:
    qkv = make_qkv(*SHORT, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = headwise.attention(*qkv, mask=headwise.causal())
    for grad in torch.autograd.grad(out.float().square().sum(), qkv):
        assert grad.dtype == torch.float32 and bool(grad.isfinite().all())


# -- meta and fake tensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "causal", "everything"])
def test_meta_tensors_tell_the_shape(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        real = BUILT[name](*make_qkv(*SHORT, dtype=dtype))
        meta = BUILT[name](*make_qkv(*SHORT, dtype=dtype, device="meta"))
        for x, y in both(real, meta):
            assert (x.shape, x.dtype) == (y.shape, y.dtype) and y.device.type == "meta"


@pytest.mark.parametrize("name", ["plain", "causal", "everything"])
def test_fake_tensors_tell_the_shape(name: str) -> None:
    real = BUILT[name](*make_qkv(*SHORT))
    with FakeTensorMode():
        fake = BUILT[name](*(torch.empty(x.shape) for x in make_qkv(*SHORT)))
    for x, y in both(real, fake):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


BY_MAP: dict[str, Callable[[], headwise.Mask]] = {
    "function": lambda: headwise.rule(lambda b, h, i, j: (i - j) % 3 == 0),
    "dilated": lambda: headwise.dilated(2),
    "or": lambda: headwise.window(3) | headwise.prefix(2),
}


@pytest.mark.parametrize("name", BY_MAP)
def test_fake_tensors_under_masks_that_are_maps_of_tiles(name: str) -> None:
    """No map can be made of them; what is kept with a rule is still that of real tensors."""
    qkv, mask = make_qkv(*SHORT), BY_MAP[name]()
    targets = {"x": torch.zeros(SHORT.B, SHORT.T, 1, dtype=torch.long)}

    def jobs(q: Tensor, k: Tensor, v: Tensor, targets: dict[str, Tensor]) -> list[Tensor]:
        heads = headwise.statistics(q, k, mask=mask, targets=targets)
        top = headwise.top_keys(q, k, 2, mask=mask)
        rows = headwise.weights(q, k, mask=mask, rows=torch.zeros(1, dtype=torch.long, device=q.device))
        return [headwise.attention(q, k, v, mask=mask), heads.entropy, heads.targets["x"], top.weights, rows]

    with FakeTensorMode():
        fakes = [torch.empty(x.shape) for x in qkv]
        fake = jobs(*fakes, {"x": torch.zeros(SHORT.B, SHORT.T, 1, dtype=torch.long)})
        if error_for() is None:
            with pytest.raises(ValueError, match="by a map of tiles, which is not made while tracing"):
                headwise.attention(*fakes, mask=mask, backend="native")
    for x, y in zip(jobs(*qkv, targets), fake, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    mask_again = BY_MAP[name]()
    assert_same_bits(headwise.attention(*qkv, mask=mask), headwise.attention(*qkv, mask=mask_again))


@pytest.mark.unchecked
def test_flex_is_refused_where_torch_does_not_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, why = make_qkv(*SHORT), "FlexAttention compiled on a CPU returns no log-sum-exp"
    run = torch.compile(lambda *qkv: headwise.attention(*qkv, backend="flex"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=why):
        run(*qkv)
    assert why not in str(headwise.explain(*qkv))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert why in str(headwise.explain(*qkv))


def test_a_huge_call_can_be_planned_on_meta() -> None:
    n = Sizes(8, 128, 8, 100_000, 100_000, 128, 128)
    shapes = ((n.B, n.H, n.T, n.D), (n.B, n.K, n.S, n.D), (n.B, n.K, n.S, n.V))
    q, k, v = (torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes)
    assert headwise.attention(q, k, v, mask=headwise.causal()).shape == (n.B, n.H, n.T, n.V)
