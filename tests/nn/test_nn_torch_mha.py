"""torch.nn.MultiheadAttention and back: equal outputs, inverted masks, refusals; and where it gives NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.nn import InnerAttention, MultiHeadAttention, Rotary, from_torch, mask_from_torch, mask_to_torch, to_torch

B, T, S, H, M = 2, 5, 7, 3, 33
THEIRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim and vdim": {"kdim": 11, "vdim": 13},
    "vdim alone, no bias": {"vdim": 13, "bias": False},
}


def make(batch_first: bool = True, **options: Any) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(M, H, batch_first=batch_first, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def inputs(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, T, M), torch.randn(B, S, module.kdim), torch.randn(B, S, module.vdim)


def call(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Tensor:
    """Batch first, whatever the module wants."""
    if module.batch_first:
        return module(query, key, value, need_weights=False, **masks)[0]
    return module(*(t.transpose(0, 1) for t in (query, key, value)), need_weights=False, **masks)[0].transpose(0, 1)


def close(one: Tensor, other: Tensor) -> bool:
    """Two orders of one float32 sum: at most 32 ulps of the largest number (measured: 4)."""
    return bool((one - other).detach().abs().max() <= 32 * torch.finfo(one.dtype).eps * other.detach().abs().max())


@pytest.mark.parametrize("kind", THEIRS)
def test_what_is_frozen_stays_frozen_there_and_back(kind: str) -> None:
    theirs = make(**THEIRS[kind])
    for alone in (None, *dict(theirs.named_parameters())):
        for name, parameter in theirs.named_parameters():
            parameter.requires_grad_(name == alone)
        ours = from_torch(theirs)
        again = dict(to_torch(ours).named_parameters())
        assert {name for name, parameter in again.items() if parameter.requires_grad} == {alone} - {None}
        assert any(parameter.requires_grad for parameter in ours.parameters()) == (alone is not None)
    ours = MultiHeadAttention(12, 4, num_kv_heads=2, bias="qkv").requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in to_torch(ours).parameters())
    ours.v_proj.weight.requires_grad_()
    again = dict(to_torch(ours).named_parameters())
    assert [name for name, parameter in again.items() if parameter.requires_grad] == ["in_proj_weight"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", THEIRS)
def test_from_torch_and_back_give_equal_outputs(kind: str, batch_first: bool, training: bool) -> None:
    theirs = make(batch_first, **THEIRS[kind]).train(training)
    if not batch_first:
        with pytest.raises(ValueError, match=r"takes \(T, B, M\), while .*set module.batch_first = True first"):
            from_torch(theirs)
        theirs.batch_first = True  # the way out that the error names
    ours = from_torch(theirs)
    theirs.batch_first = batch_first
    again = to_torch(ours)
    assert ours.training == again.training == training and again.batch_first
    query, key, value = inputs(theirs)
    with torch.set_grad_enabled(training):  # eval without gradients takes torch's fast path
        assert close(ours(query, (key, value)), call(theirs, query, key, value))
        assert close(call(again, query, key, value), call(theirs, query, key, value))
        if theirs.kdim == theirs.vdim == M:
            assert close(ours(query), call(theirs, query, query, query))
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], parameter), name


def test_gradients_are_equal() -> None:
    theirs = make()
    ours, (query, key, value) = from_torch(theirs), inputs(theirs)
    call(theirs, query, key, value).square().sum().backward()
    ours(query, (key, value)).square().sum().backward()
    parts = (ours.q_proj, ours.k_proj, ours.v_proj)
    assert close(torch.cat([p.weight.grad for p in parts]), theirs.in_proj_weight.grad)
    assert close(torch.cat([p.bias.grad for p in parts]), theirs.in_proj_bias.grad)
    assert close(ours.o_proj.weight.grad, theirs.out_proj.weight.grad)


def test_dropout_comes_along_and_is_off_in_eval() -> None:
    theirs = make(dropout=0.4).eval()
    ours = from_torch(theirs)
    assert ours.inner.dropout == 0.4 and to_torch(ours).dropout == 0.4  # type: ignore[comparison-overlap]
    query, key, value = inputs(theirs)
    assert close(ours(query, (key, value)), call(theirs, query, key, value))
    # In training both drop: the mean over many draws is the output without dropout.
    ours.train(), theirs.train()
    exact = ours.eval()(query, (key, value))
    ours.train()
    with torch.no_grad():
        many = [t.expand(4000, *t.shape[1:]) for t in (query[:1], key[:1], value[:1])]
        for drawn in (ours(many[0], (many[1], many[2])), call(theirs, *many)):
            spread = drawn.std(0) / 4000**0.5
            assert bool(((drawn.mean(0) - exact[0]).abs() < 6 * spread).all()) and bool((spread > 0).all())


def test_shared_keys_and_values_are_repeated_for_torch() -> None:
    ours, x = MultiHeadAttention(M, 33, num_kv_heads=11, bias="qkv"), torch.randn(B, T, M)
    nn.init.normal_(ours.v_proj.bias)
    assert close(to_torch(ours)(x, x, x)[0], ours(x))


# --- masks ------------------------------------------------------------------------------------------------------------


def hidden(*shape: int) -> Tensor:
    """True = hide, with the first key always shown."""
    hide = torch.rand(shape) < 0.5
    hide[..., 0] = False
    return hide


def as_float(hide: Tensor) -> Tensor:
    return torch.randn(hide.shape).masked_fill(hide, -torch.inf)


ATTN: dict[str, Any] = {
    "none": None,
    "2-D": lambda: hidden(T, S),
    "3-D": lambda: hidden(B * H, T, S),
    "2-D float": lambda: as_float(hidden(T, S)),
    "3-D float": lambda: as_float(hidden(B * H, T, S)),
}
PADDING: dict[str, Any] = {"none": None, "bool": lambda: hidden(B, S), "float": lambda: as_float(hidden(B, S))}


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("attn", ATTN)
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask is deprecated")
def test_masks_of_torch_mean_the_same_here(attn: str, padding: str) -> None:
    attn_mask = ATTN[attn]() if ATTN[attn] else None
    key_padding_mask = PADDING[padding]() if PADDING[padding] else None
    theirs = make()
    ours, (query, key, value) = from_torch(theirs), inputs(theirs)
    mask = mask_from_torch(attn_mask, key_padding_mask, num_heads=H)
    expected = call(theirs, query, key, value, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
    assert close(ours(query, (key, value), mask=mask), expected)
    if mask is None:
        assert attn == padding == "none"
    else:
        back = mask_to_torch(mask, T, S, batch=B, num_heads=H)
        assert close(call(theirs, query, key, value, attn_mask=back), expected)


def test_a_mask_goes_to_torch_and_back() -> None:
    for mask in (
        headwise.causal(),
        headwise.lengths(torch.tensor([3, 6])),
        headwise.alibi(torch.tensor([0.5, 0.25, 1])),
    ):
        theirs = mask_to_torch(mask, T, S, batch=B, num_heads=H)
        assert theirs.shape == ((T, S) if mask.dense(T, S).shape[:2] == (1, 1) else (B * H, T, S))
        again = mask_from_torch(theirs, num_heads=H)
        assert again is not None
        assert torch.equal(again.dense(T, S).expand(B, H, T, S), mask.dense(T, S).expand(B, H, T, S))


def test_where_nothing_may_be_attended_torch_gives_nan_and_ours_the_bias() -> None:
    theirs = make()
    ours, (query, key, value) = from_torch(theirs), inputs(theirs)
    hide = torch.zeros(B, S, dtype=torch.bool)
    hide[1] = True
    out = ours(query, (key, value), mask=mask_from_torch(key_padding_mask=hide, num_heads=H))
    assert torch.equal(out[1], ours.o_proj.bias.expand(T, M))
    weights_asked_for = theirs(query, key, value, key_padding_mask=hide)[0]
    assert bool(weights_asked_for[1].isnan().all()) and close(out[0], weights_asked_for[0])
    out.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in ours.parameters() if p.grad is not None)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            assert torch.equal(ours.train(training)(query, (key, value), mask=headwise.keep(~hide[:, None, None])), out)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_one_row_of_padding_is_every_rows(dtype: torch.dtype) -> None:
    """As `torch.nn.MultiheadAttention` takes it of a call without a batch."""
    hide = torch.tensor([False, True, False, False, True, False, True])
    hide = hide if dtype == torch.bool else torch.zeros(S).masked_fill(hide, -torch.inf)
    one, all_rows = (mask_from_torch(key_padding_mask=x, num_heads=H) for x in (hide, hide.expand(3, S)))
    assert one is not None and all_rows is not None
    assert torch.equal(one.dense(4, S).expand(3, 1, 4, S), all_rows.dense(4, S).expand(3, 1, 4, S))


@pytest.mark.unchecked
def test_what_answers_for_torchs_module_is_not_lost() -> None:
    """Hooks and another forward may compute something else than the parameters say."""

    class Doubled(nn.MultiheadAttention):
        def forward(self, *args: Any, **options: Any) -> Any:
            out, weights = super().forward(*args, **options)
            return 2 * out, weights

    hooked, before, own = make(), make(), make()
    hooked.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))
    before.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
    own.forward = lambda *args, **options: (args[0], None)  # type: ignore[assignment, method-assign]
    changed = ((hooked, "has hooks"), (before, "has hooks"), (own, "has a forward of its own"))
    for module, how in (*changed, (Doubled(M, H, batch_first=True), "Doubled has a forward of its own")):
        with pytest.raises(TypeError, match=f"from_torch takes a torch.nn.MultiheadAttention as it is; .*{how}"):
            from_torch(module)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_rows_that_torch_adds_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"built with {option}=True, which adds a key and a value to every sequence"):
        from_torch(make(**{option: True}))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("built", "text"),
    [
        ({"rotary": Rotary(4)}, "a rotary part"),
        ({"qk_norm": nn.RMSNorm}, "q_norm and k_norm"),
        ({"head_dim": 5}, "heads with H * D = 15 != d_model = 12"),
        ({"value_dim": 5}, "value_dim = 5 != head_dim = 4"),
        ({"inner": InnerAttention(softcap=2.0, scale=0.5)}, "softcap = 2.0, scale = 0.5; keep headwise.MultiHead"),
        ({"inner": InnerAttention(sinks=torch.zeros(3))}, "sinks"),
        ({"inner": lambda q, k, v, *, mask: v}, "the inner part InnerFunction"),
    ],
)
def test_what_torch_has_no_place_for_is_refused(built: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        to_torch(MultiHeadAttention(12, 3, **built))
    assert str(caught.value).startswith("torch.nn.MultiheadAttention has no place for what this module has: ")
    assert text in str(caught.value)


@pytest.mark.unchecked
def test_wrong_arguments() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: from_torch(nn.Linear(2, 2)), TypeError, "from_torch takes a torch.nn.MultiheadAttention; got Linear"),  # type: ignore[arg-type]
        (lambda: to_torch(nn.Linear(2, 2)), TypeError, "to_torch takes a headwise.MultiHeadAttention; got Linear"),  # type: ignore[arg-type]
        (
            lambda: mask_from_torch(torch.ones(T, S).long(), num_heads=H),
            TypeError,
            "attn_mask is bool (True = hide) or float (added); got int64 (5, 7) on cpu",
        ),
        (
            lambda: mask_from_torch(torch.ones(4, T, S), num_heads=H),
            ValueError,
            "attn_mask is (T, S) or (B * H, T, S) with H = 3; got float32 (4, 5, 7) on cpu; headwise.keep takes",
        ),
        (
            lambda: mask_from_torch(key_padding_mask=torch.ones(1, 1, S), num_heads=H),
            ValueError,
            "key_padding_mask is (B, S) or (S,); got float32 (1, 1, 7) on cpu",
        ),
        (
            lambda: mask_to_torch(headwise.lengths(torch.tensor([1, 2])), T, S),
            ValueError,
            "made for 2 batch rows and 1 heads (1 = any); got batch=1, num_heads=1; pass those of the call",
        ),
    ]
    for function, error, text in wrong:
        with pytest.raises(error) as caught:
            function()
        assert text in str(caught.value)
