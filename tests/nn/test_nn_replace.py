"""`headwise.nn.replace`: what torch.nn.MultiheadAttention gives, drawn over its options; encoders; what is kept."""

import copy
import io
import pickle
import random
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.nn import probe, replace

B, T, S, H, D, KDIM, VDIM = 2, 5, 7, 3, 11, 13, 17
M = H * D


def draw(seed: int) -> dict[str, Any]:
    """The options of a module, and how it is called."""
    rng = random.Random(seed)
    own = rng.random() < 0.4  # self-attention
    options = {
        "bias": rng.random() < 0.7,
        "add_bias_kv": rng.random() < 0.3,
        "add_zero_attn": rng.random() < 0.3,
        "batch_first": rng.random() < 0.5,
        "kdim": None if own or rng.random() < 0.5 else KDIM,
        "vdim": None if own or rng.random() < 0.5 else VDIM,
    }
    masks = (None, None, "bool", "float")
    return {
        "options": options,
        "dtype": rng.choice([torch.float32, torch.float64]),
        "unbatched": rng.random() < 0.2,
        "same": "query" if own else rng.choice(["key", None]),
        "attn_mask": rng.choice(masks),
        "by_head": rng.random() < 0.4,
        "key_padding_mask": rng.choice(masks),
        "causal": rng.random() < 0.3,
        "average": rng.random() < 0.5,
    }


def mask_of(kind: str | None, *shape: int, dtype: torch.dtype) -> Tensor | None:
    """True or -inf hides; the first key is always shown."""
    if kind is None:
        return None
    hide = torch.rand(shape) < 0.4
    hide[..., 0] = False
    return hide if kind == "bool" else torch.randn(shape, dtype=dtype).masked_fill(hide, -torch.inf)


def made(drawn: dict[str, Any]) -> tuple[nn.MultiheadAttention, tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """A module of torch's, what goes into it, and the masks and flags of the call."""
    options, dtype = drawn["options"], drawn["dtype"]
    module = nn.MultiheadAttention(M, H, **options).to(dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    rows = 1 if drawn["unbatched"] else B

    def tensor(n: int, width: int) -> Tensor:
        x = torch.randn(rows, n, width, dtype=dtype)
        return x[0] if drawn["unbatched"] else x if options["batch_first"] else x.transpose(0, 1)

    query = tensor(T, M)
    key = query if drawn["same"] == "query" else tensor(S, module.kdim)
    value = (
        key
        if drawn["same"] and module.kdim == module.vdim
        else tensor(key.shape[0 if key.ndim == 2 else 1 if options["batch_first"] else 0], module.vdim)
    )
    n = T if key is query else S
    attn_mask = mask_of(drawn["attn_mask"], *((rows * H,) if drawn["by_head"] else ()), T, n, dtype=dtype)
    call = {"attn_mask": attn_mask, "average_attn_weights": drawn["average"]}
    if drawn["causal"]:
        call["attn_mask"] = torch.ones(T, n, dtype=torch.bool).triu(1)
        call["is_causal"] = True
    hidden = mask_of(drawn["key_padding_mask"], *(() if drawn["unbatched"] else (rows,)), n, dtype=dtype)
    return module, (query, key, value), call | {"key_padding_mask": hidden}


def results(
    module: nn.MultiheadAttention, inputs: tuple[Tensor, Tensor, Tensor], call: dict[str, Any], **more: Any
) -> dict[str, Tensor]:
    """Output, weights, and the gradients of a sum of both by inputs, parameters and float masks."""
    dtype = next(module.parameters()).dtype
    leaves: dict[int, Tensor] = {}
    for x in (*inputs, *call.values()):
        if isinstance(x, Tensor) and x.is_floating_point() and id(x) not in leaves:
            leaves[id(x)] = x.detach().to(dtype).requires_grad_()
    query, key, value = (leaves[id(x)] for x in inputs)
    call = {name: leaves.get(id(x), x) for name, x in call.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of masks of two types
        out, matrix = module(query, key, value, **call, **more)
    loss = (out.sin() + (0 if matrix is None else matrix.square().sum())).sum()
    wanted = [*leaves.values(), *module.parameters()]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    got = {f"gradient {i}": g for i, g in enumerate(grads) if g is not None}
    return {"out": out, **({} if matrix is None else {"weights": matrix}), **got}


def assert_as_close_as_torchs(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Errors against torch's result in float64: at most 8 times those that torch makes, and 32 ulps of the largest."""
    assert ours.keys() == exact.keys()
    for name, x in ours.items():
        size, y = exact[name].abs().max(), theirs[name]
        assert x.dtype == y.dtype and x.shape == y.shape, name
        allowed = 8 * (y.double() - exact[name]).abs().max() + 32 * torch.finfo(x.dtype).eps * size
        assert (x.double() - exact[name]).abs().max() <= allowed, name


@pytest.mark.parametrize("need_weights", [False, True], ids=["out", "weights"])
@pytest.mark.parametrize("seed", range(60))
def test_numbers_and_gradients_are_torchs(seed: int, need_weights: bool) -> None:
    drawn = draw(seed)
    module, inputs, call = made(drawn)
    options = drawn["options"]
    if drawn["causal"] and (options["add_bias_kv"] or options["add_zero_attn"]):
        call["is_causal"] = False  # torch hides the added keys then, unless it needs weights: see below
    exact = results(copy.deepcopy(module).double(), inputs, call, need_weights=need_weights)
    theirs = results(module, inputs, call, need_weights=need_weights)
    ours = results(replace(copy.deepcopy(module)), inputs, call, need_weights=need_weights)
    assert_as_close_as_torchs(ours, theirs, exact)


def test_the_hint_hides_no_added_key() -> None:
    module = nn.MultiheadAttention(M, H, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    x, hide = torch.randn(B, T, M), torch.ones(T, T, dtype=torch.bool).triu(1)
    expected, matrix = module(x, x, x, attn_mask=hide, is_causal=True)
    assert matrix.shape == (B, T, T + 2) and bool((matrix[:, 0, T:] > 0).all())
    out, nothing = replace(module)(x, x, x, attn_mask=hide, is_causal=True, need_weights=False)
    torch.testing.assert_close(out, expected)
    assert nothing is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_dtypes_and_autocast(dtype: torch.dtype) -> None:
    module, x = nn.MultiheadAttention(M, H, batch_first=True), torch.randn(B, T, M)
    exact, ours = module(x, x, x)[0], replace(copy.deepcopy(module))
    autocast = torch.autocast("cpu", dtype=dtype)
    for one, other, lowered in ((ours, module, autocast), (ours.to(dtype), module.to(dtype), nullcontext())):
        for need_weights in (False, True):
            y = x.to(next(other.parameters()).dtype)
            with lowered:
                out, theirs = (m(y, y, y, need_weights=need_weights)[0] for m in (one, other))
            assert out.dtype == theirs.dtype
            allowed = 4 * (theirs - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
            assert (out - exact).abs().max() <= allowed


def test_a_row_that_may_attend_nothing_gives_zeros_and_what_is_hidden_has_no_influence() -> None:
    module, x = nn.MultiheadAttention(M, H, bias=False, batch_first=True), torch.randn(B, T, M)
    hide = torch.zeros(T, T, dtype=torch.bool)
    hide[3], hide[:, 1] = True, True
    assert module(x, x, x, attn_mask=hide)[1][:, 3].isnan().all()
    ours = replace(module)
    key = torch.cat([x[:, :1], torch.full((B, 1, M), torch.nan), x[:, 2:]], dim=1)
    for need_weights in (False, True):
        clean = ours(x, x, x, attn_mask=hide, need_weights=need_weights)[0]
        for value in (x, key):
            out, matrix = ours(x, key, value, attn_mask=hide, need_weights=need_weights)
            assert not out[:, 3].any() and torch.equal(out.isnan(), torch.zeros_like(out, dtype=torch.bool))
            torch.testing.assert_close(out, clean)
            assert matrix is None or not matrix[:, 3].any()
        value = key.clone()
        value[:, 2, 0] = torch.inf  # a visible one is shown
        assert ours(x, x, value, attn_mask=hide, need_weights=need_weights)[0][:, 4].isnan().all()


def test_gradients_flow_through_the_weights_to_the_output() -> None:
    """By the chain rule: the gradient of the heads times the values. (The weights that torch returns have none.)"""
    module, x = replace(nn.MultiheadAttention(M, H, batch_first=True)), torch.randn(B, T, M)
    out, matrix = module(x, x, x, average_attn_weights=False)
    [grad] = torch.autograd.grad(out.sin().sum(), matrix)
    value = (x @ module.in_proj_weight[2 * M :].T + module.in_proj_bias[2 * M :]).unflatten(-1, (H, D)).transpose(1, 2)
    of_heads = (out.cos() @ module.out_proj.weight).unflatten(-1, (H, D)).transpose(1, 2)
    torch.testing.assert_close(grad, of_heads @ value.mT)


# --- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_drawn_in_training_alone_and_follows_the_attribute() -> None:
    ours = replace(nn.MultiheadAttention(M, H, dropout=0.4, batch_first=True))
    x = torch.randn(1, T, M)
    exact = ours.eval()(x, x, x, need_weights=False)[0][0].detach()
    ours.train()
    many = x.expand(3000, -1, -1)
    with torch.no_grad():
        for need_weights in (False, True):
            drawn = ours(many, many, many, need_weights=need_weights)[0]
            spread = drawn.std(0) / 3000**0.5
            assert bool(((drawn.mean(0) - exact).abs() < 6 * spread).all()) and bool((spread > 0).all())
    out, matrix = ours(x, x, x, average_attn_weights=False)
    assert 0 < int((matrix == 0).sum()) < matrix.numel()
    v = nn.functional.linear(x, ours.in_proj_weight[2 * M :], ours.in_proj_bias[2 * M :]).unflatten(-1, (H, D))
    torch.testing.assert_close(ours.out_proj((matrix @ v.transpose(1, 2)).transpose(1, 2).flatten(2)), out)
    ours.dropout = 0.0
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0][0], exact)


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_compute_the_same(how: str) -> None:
    module, x = replace(nn.MultiheadAttention(M, H, dropout=0.3, batch_first=True)).eval(), torch.randn(B, T, M)
    if how == "save":
        torch.save(module, file := io.BytesIO())
        file.seek(0)
        again = torch.load(file, weights_only=False)
    else:
        again = copy.deepcopy(module) if how == "deepcopy" else pickle.loads(pickle.dumps(module))
    assert torch.equal(again(x, x, x)[0], module(x, x, x)[0]) and again.dropout == 0.3
    again.dropout = 0.1
    assert module.dropout == 0.3


class Other(nn.MultiheadAttention):
    pass


def test_what_may_compute_something_else_is_refused_and_nothing_is_replaced() -> None:
    changed = nn.MultiheadAttention(M, H)
    changed.forward = lambda *args: args  # type: ignore[assignment]
    for second in (Other(M, H), changed):
        model = nn.Sequential(nn.MultiheadAttention(M, H), second)
        with pytest.raises(TypeError, match=r"'1' is a .*replace first"):
            replace(model)
        assert type(model[0]) is nn.MultiheadAttention
    with pytest.raises(ValueError, match=r"Linear has no torch\.nn\.MultiheadAttention to replace; .*rebuilt"):
        replace(nn.Linear(2, 3))
    with pytest.raises(TypeError):
        replace(3)  # type: ignore[type-var]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a hint alone": ({"is_causal": True}, ValueError, "is_causal=True says that attn_mask is causal"),
    "a mask of integers": ({"attn_mask": torch.ones(T, S).long()}, TypeError, r"attn_mask is bool \(True = hide\)"),
    "another mask": ({"attn_mask": torch.ones(1, S) > 0}, ValueError, r"attn_mask is \(5, 7\) or \(6, 5, 7\) here"),
    "padding": ({"key_padding_mask": torch.ones(S, B) > 0}, ValueError, r"key_padding_mask is \(2, 7\) here"),
    "no tensor": ({"key_padding_mask": [True]}, TypeError, "key_padding_mask"),
    "a width": ({"value": torch.randn(B, S, 4)}, ValueError, "for value"),
    "a length": ({"value": torch.randn(B, S + 1, M)}, ValueError, "one length, and all three one batch size"),
    "batches": ({"query": torch.randn(B + 1, T, M)}, ValueError, "the first axis"),
    "dimensions": ({"query": torch.randn(T, M)}, ValueError, "two dimensions each, or three"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_calls_that_do_not_fit(what: str) -> None:
    module = replace(nn.MultiheadAttention(M, H, batch_first=True))
    more, error, text = REFUSED[what]
    inputs = {"query": torch.randn(B, T, M), "key": torch.randn(B, S, M), "value": torch.randn(B, S, M)}
    with pytest.raises(error, match=text):
        module(**(inputs | more))


# --- probes and conversions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [False, True], ids=["out", "weights"])
def test_a_probe_sees_and_answers(need_weights: bool) -> None:
    module = replace(nn.MultiheadAttention(M, H, bias=False))
    x, hide = torch.randn(T, B, M), torch.ones(T, T, dtype=torch.bool).triu(1)
    out, matrix = module(x, x, x, attn_mask=hide, need_weights=need_weights, average_attn_weights=False)
    with probe(module) as seen:
        module(x, x, x, attn_mask=hide, need_weights=need_weights)
    [call] = seen.calls
    theirs = headwise.weights(call.query, call.key, **call.scoring)
    torch.testing.assert_close(module.out_proj(call.attend().transpose(1, 2).flatten(2)).transpose(0, 1), out)
    with probe(module, lambda call: torch.zeros_like(call.attend())):
        nothing, same = module(x, x, x, attn_mask=hide, need_weights=need_weights, average_attn_weights=False)
    assert not nothing.any()
    if need_weights:
        torch.testing.assert_close(theirs, matrix)
        torch.testing.assert_close(same, matrix)


def test_a_probe_names_what_it_cannot_see() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours, self.pool = headwise.MultiHeadAttention(M, H), nn.MultiheadAttention(M, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.ours(x)
            return self.pool(x, x, x)[0]

    model, x = Mixed(), torch.randn(B, T, M)
    with pytest.warns(UserWarning, match=r"run unseen: 'pool'; headwise\.nn\.replace\(model\)"), probe(model):
        model(x)
    with probe(replace(model)) as seen:
        model(x)
    assert [call.module for call in seen.calls] == ["ours", "pool"]
    with (
        pytest.raises(TypeError, match=r"'0'\) are seen after headwise\.nn\.replace\(model\)"),
        probe(nn.Sequential(model.pool.__class__.__base__(M, H))),
    ):
        pass


def test_converted_and_traced() -> None:
    module, x = nn.MultiheadAttention(M, H, batch_first=True), torch.randn(B, T, M)
    expected = module(x, x, x)[0]
    traced = headwise.trace(module, x)
    torch.testing.assert_close(traced["output"].tensor, expected)
    ours = replace(module)
    assert torch.equal(headwise.nn.from_torch(ours)(x), headwise.nn.from_torch(module)(x))
    assert torch.equal(headwise.trace(ours, x)["weights"].tensor, traced["weights"].tensor)
    assert ours.state_dict().keys() == module.state_dict().keys()
