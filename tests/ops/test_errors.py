"""What is wrong is said: the rule, the values met, and a way out; the same text from `attention` and from `explain`."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import headwise
from headwise.ops.native import library as native_library
from headwise.testing import make_qkv

pytestmark = pytest.mark.unchecked  # the shape checker would speak before we do

Q, K, V = make_qkv(2, 6, 3, 5, 7, 11, 13)


def call(**changed: Any) -> tuple[tuple[Any, Any, Any], dict[str, Any]]:
    arguments = {"query": Q, "key": K, "value": V, **changed}
    return (arguments.pop("query"), arguments.pop("key"), arguments.pop("value")), arguments


BLOCK_MASK = create_block_mask(lambda b, h, i, j: i >= j, 2, 6, 5, 7, device="cpu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# name: (what is changed, the error's type, what its text must hold: the rule, the values, the way out)
CASES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    # query, key, value
    "query is an array": ({"query": np.zeros((2, 6, 5, 11))}, TypeError, ["query (B, H, T, D)", "query is ndarray"]),
    "key is None": ({"key": None}, TypeError, ["key (B, K, S, D)", "key is NoneType"]),
    "value is a list": ({"value": [1.0]}, TypeError, ["value (B, K, S, V)", "value is list"]),
    "three axes": ({"query": zeros(2, 5, 66)}, ValueError, ["four axes", "(2, 5, 66)", ".unflatten(-1, (H, D))"]),
    "five axes": ({"key": zeros(1, 2, 3, 7, 11)}, ValueError, ["four axes", "(1, 2, 3, 7, 11)", ".unflatten"]),
    "value of three axes": ({"value": zeros(2, 7, 39)}, ValueError, ["four axes", "(2, 7, 39)", ".unflatten"]),
    "integers": (
        {"query": zeros(2, 6, 5, 11, dtype=torch.int64)},
        ValueError,
        ["float32, bfloat16, float16 or float64", "int64 (2, 6, 5, 11)", ".float()"],
    ),
    "complex": ({"query": zeros(2, 6, 5, 11, dtype=torch.complex64)}, ValueError, ["float32", "complex64", ".float()"]),
    "key of another dtype": ({"key": K.double()}, ValueError, ["one dtype", "float32", "float64", ".to(query.dtype)"]),
    "value of another dtype": ({"value": V.half()}, ValueError, ["one dtype", "float16", ".to(query.dtype)"]),
    "key on another device": ({"key": K.to("meta")}, ValueError, ["one device", "meta", "cpu", ".to(query.device)"]),
    "value on another device": ({"value": V.to("meta")}, ValueError, ["one device", "meta", ".to(query.device)"]),
    "batch sizes": ({"query": zeros(3, 6, 5, 11)}, ValueError, ["batch size", "B = 3", "B = 2", ".expand("]),
    "value's batch": (
        {"value": zeros(1, 3, 7, 13)},
        ValueError,
        ["key and value share batch", "(2, 3, 7)", "(1, 3, 7)"],
    ),
    "head dims": (
        {"key": zeros(2, 3, 7, 12)},
        ValueError,
        ["head dim D", "D = 11", "D = 12", "(B, heads, length, D)?"],
    ),
    "key and value of unequal length": (
        {"value": zeros(2, 3, 8, 13)},
        ValueError,
        ["share batch, key-value heads and length", "(2, 3, 7)", "(2, 3, 8)", "slice"],
    ),
    "key and value of unequal heads": (
        {"value": zeros(2, 6, 7, 13)},
        ValueError,
        ["key-value heads", "(2, 3, 7)", "(2, 6, 7)"],
    ),
    "heads not a multiple": (
        {"query": zeros(2, 7, 5, 11)},
        ValueError,
        [
            "multiple of num_kv_heads",
            "H = 7, K = 3",
            "1 over",
            "h // (H / K)",
            "(B, heads, length, D)?",
            "(2, 3, 7, 11)",
        ],
    ),
    "fewer heads than key-value heads": ({"query": zeros(2, 2, 5, 11)}, ValueError, ["multiple", "H = 2, K = 3"]),
    "no heads": ({"query": zeros(2, 0, 5, 11)}, ValueError, ["at least 1", "H = 0"]),
    "no key-value heads": (
        {"key": zeros(2, 0, 7, 11), "value": zeros(2, 0, 7, 13)},
        ValueError,
        ["at least 1", "K = 0"],
    ),
    "head dim 0": (
        {"query": zeros(2, 6, 5, 0), "key": zeros(2, 3, 7, 0)},
        ValueError,
        ["D is at least 1", "(2, 6, 5, 0)"],
    ),
    "value dim 0": ({"value": zeros(2, 3, 7, 0)}, ValueError, ["V is at least 1", "(2, 3, 7, 0)"]),
    # options
    "scale is a tensor": ({"scale": torch.tensor(0.5)}, TypeError, ["scale is a number", "Tensor", ".item()"]),
    "scale is text": ({"scale": "auto"}, TypeError, ["scale is a number or None", "str"]),
    "scale is NaN": ({"scale": math.nan}, ValueError, ["scale", "finite", "nan"]),
    "scale is infinite": ({"scale": math.inf}, ValueError, ["scale", "finite", "inf"]),
    "scale is numpy's NaN": ({"scale": np.float32("nan")}, ValueError, ["scale", "finite", "got nan"]),
    "scale is huge": ({"scale": 1e300}, ValueError, ["scale", "2**-100 to 2**100", "got 1e+300", "D ** -0.5"]),
    "scale is just beyond": ({"scale": -1.01 * 2.0**100}, ValueError, ["scale", "2**-100 to 2**100", "got -1.28"]),
    "scale is tiny": ({"scale": 0.99 * 2.0**-100}, ValueError, ["scale is", "0 or in size", "got 7.8"]),
    "scale is a huge integer": ({"scale": 10**400}, ValueError, ["scale", "got an integer of 1329 bits"]),
    "softcap is huge": ({"softcap": 1e38}, ValueError, ["softcap", "2**-100 to 2**100", "got 1e+38", "None"]),
    "softcap is just beyond": ({"softcap": 1.01 * 2.0**100}, ValueError, ["softcap", "2**100", "got 1.28"]),
    "softcap is tiny": ({"softcap": 1e-300}, ValueError, ["softcap > 0", "2**-100", "got 1e-300"]),
    "softcap is numpy's NaN": ({"softcap": np.float64("nan")}, ValueError, ["softcap", "got nan"]),
    "dropout is a huge integer": ({"dropout": 10**400}, ValueError, ["dropout < 1", "integer of 1329 bits"]),
    "softcap 0": ({"softcap": 0.0}, ValueError, ["softcap > 0", "got 0.0", "None"]),
    "softcap negative": ({"softcap": -30}, ValueError, ["softcap > 0", "got -30", "None"]),
    "softcap NaN": ({"softcap": math.nan}, ValueError, ["softcap", "got nan"]),
    "softcap infinite": ({"softcap": math.inf}, ValueError, ["softcap", "got inf", "None"]),
    "dropout 1": ({"dropout": 1.0}, ValueError, ["0 <= dropout < 1", "got 1.0"]),
    "dropout negative": ({"dropout": -0.1}, ValueError, ["0 <= dropout < 1", "got -0.1"]),
    "dropout NaN": ({"dropout": math.nan}, ValueError, ["0 <= dropout < 1", "got nan"]),
    "dropout is None": ({"dropout": None}, TypeError, ["dropout is a number", "NoneType"]),
    "sinks of key-value heads": ({"sinks": zeros(3)}, ValueError, ["one a query head", "(6,)", "float32 (3,)"]),
    "sinks of two axes": ({"sinks": zeros(6, 1)}, ValueError, ["(H,) = (6,)", "(6, 1)"]),
    "sinks of integers": ({"sinks": zeros(6, dtype=torch.int32)}, ValueError, ["float logits", "int32 (6,)"]),
    "sinks elsewhere": ({"sinks": zeros(6, device="meta")}, ValueError, ["query's device", "cpu", "meta"]),
    "sinks are a list": ({"sinks": [0.0] * 6}, TypeError, ["sinks", "list"]),
    "gate of another shape": ({"gate": zeros(2, 5, 6)}, ValueError, ["(B, H, T)", "2, 6, 5, 13", "(2, 5, 6)"]),
    "gate of key-value heads": ({"gate": zeros(3)}, ValueError, ["gate", "(H,)", "float32 (3,)"]),
    "gate of no axes": ({"gate": torch.tensor(1.0)}, ValueError, ["gate", "float32 ()"]),
    "gate of five axes": ({"gate": zeros(1, 2, 6, 5, 13)}, ValueError, ["gate", "(1, 2, 6, 5, 13)"]),
    "gate of bools": ({"gate": zeros(6, dtype=torch.bool)}, ValueError, ["gate is a float tensor", "bool (6,)"]),
    "gate elsewhere": ({"gate": zeros(6, device="meta")}, ValueError, ["gate", "device", "cpu", "meta"]),
    "gate is a number": ({"gate": 0.5}, TypeError, ["gate", "float"]),
    "unknown backend": (
        {"backend": "cudnn"},
        ValueError,
        ["auto, native, triton, sdpa, flex, blocks, reference", "got 'cudnn'"],
    ),
    "no backend": ({"backend": None}, ValueError, ["auto, native, triton, sdpa, flex, blocks, reference", "got None"]),
    # masks
    "mask is a list": ({"mask": [[True]]}, TypeError, ["a Mask", "True = attend", "got list", "torch.as_tensor"]),
    "mask is an array": ({"mask": np.ones((5, 7), bool)}, TypeError, ["got ndarray", "torch.as_tensor"]),
    "mask is a BlockMask": ({"mask": BLOCK_MASK}, TypeError, ["got BlockMask", "wrap its mask_mod in rule()"]),
    "mask is text": ({"mask": "causal"}, TypeError, ["a Mask (causal(), window(), ...)", "str"]),
    "mask is a function": ({"mask": headwise.causal}, TypeError, ["got function", "call it, as in causal()", "rule()"]),
    "mask of integers": (
        {"mask": zeros(5, 7, dtype=torch.int64)},
        TypeError,
        ["True = attend", "int64", "mask.bool()"],
    ),
    "mask of another length": (
        {"mask": torch.ones(5, 8, dtype=torch.bool)},
        ValueError,
        ["broadcasts to (B, H, T, S) = (2, 6, 5, 7)", "got (5, 8)"],
    ),
    "mask (B, S)": ({"mask": torch.ones(2, 7, dtype=torch.bool)}, ValueError, ["(2, 7)", "mask[:, None, None, :]"]),
    "mask (B, T, S)": ({"mask": zeros(2, 5, 7)}, ValueError, ["(2, 6, 5, 7)", "got (2, 5, 7)", "mask[:, None]"]),
    "mask of five axes": ({"mask": zeros(1, 2, 6, 5, 7)}, ValueError, ["1 to 4 axes", "(1, 2, 6, 5, 7)"]),
    "mask of no axes": ({"mask": torch.tensor(True)}, ValueError, ["1 to 4 axes", "bool ()"]),
    "mask elsewhere": (
        {"mask": zeros(5, 7, device="meta")},
        ValueError,
        ["query's device cpu", "meta", "mask.to(device)"],
    ),
    "lengths elsewhere": (
        {"mask": headwise.lengths(zeros(2, dtype=torch.long, device="meta"))},
        ValueError,
        ["lengths", "meta", "mask.to(device)"],
    ),
    "lengths of another batch": (
        {"mask": headwise.lengths(torch.tensor([1, 2, 3]))},
        ValueError,
        ["lengths", "(2,)", "int64 (3,)"],
    ),
    "start of another batch": (
        {"mask": headwise.lengths(torch.tensor([1, 2]), torch.tensor([0, 0, 0]))},
        ValueError,
        ["start", "(2,)", "(3,)"],
    ),
    "query ids of another length": (
        {"mask": headwise.segments(torch.zeros(7).long())},
        ValueError,
        ["query_ids", "(5,) or (1, 5) or (2, 5)", "(7,)"],
    ),
    "key ids of another length": (
        {"mask": headwise.segments(torch.zeros(5).long())},
        ValueError,
        ["key_ids", "(7,) or (1, 7) or (2, 7)", "(5,)"],
    ),
    "offset of another batch": (
        {"mask": headwise.causal(offset=torch.tensor([1, 2, 3]))},
        ValueError,
        ["offset of the mask", "(2,)", "(3,)"],
    ),
    "slopes of key-value heads": ({"mask": headwise.alibi(torch.ones(3))}, ValueError, ["H = 6", "(3,)"]),
    # what other libraries call it
    "is_causal": ({"is_causal": True}, TypeError, ["no option 'is_causal'", "causal()", "causal_top_left()"]),
    "attn_mask": ({"attn_mask": None}, TypeError, ["no option 'attn_mask'", "use mask=...", "True = attend"]),
    "enable_gqa": ({"enable_gqa": True}, TypeError, ["no option 'enable_gqa'", "leave it out"]),
    "flash": ({"window_size": (3, 0)}, TypeError, ["no option 'window_size'", "window(left + 1, right)"]),
    "no such option": ({"sofcap": 3.0}, TypeError, ["no option 'sofcap'", "softcap, sinks, dropout, gate"]),
    "one slope": ({"mask": headwise.alibi(torch.ones(1))}, ValueError, ["one slope a query head", "H = 6", "(1,)"]),
    "five slopes": ({"mask": headwise.alibi(torch.ones(5))}, ValueError, ["slopes (5,); alibi_slopes(6) has"]),
}


@pytest.fixture(params=["the short way", "the long way"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is said in the same words where the native kernel is called at once, before any check of ours."""
    if request.param == "the long way":
        monkeypatch.setattr(native_library, "attend", None)
    elif native_library.error_for():
        pytest.skip(f"there is no short way: {native_library.error_for()}")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", CASES)
def test_attention_says_what_is_wrong(name: str) -> None:
    changed, error, fragments = CASES[name]
    qkv, options = call(**changed)
    with pytest.raises(error) as caught:
        headwise.attention(*qkv, **options)
    text = str(caught.value)
    assert type(caught.value) is error
    missing = [fragment for fragment in fragments if fragment not in text]
    assert not missing, f"{text!r} does not say {missing}"
    assert len(text) < 400 and "\n" not in text


@pytest.mark.parametrize("name", CASES)
def test_explain_says_the_same(name: str) -> None:
    changed, error, _ = CASES[name]
    qkv, options = call(**changed)
    texts = []
    for function in (headwise.attention, headwise.explain):
        with pytest.raises(error) as caught:
            function(*qkv, **options)  # type: ignore[operator]
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


WEIGHTS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "stage": ({"stage": "softmax"}, ValueError, ["raw, softcapped, biased, probabilities", "got 'softmax'"]),
    "row beyond": ({"rows": 5}, ValueError, ["rows", "-5 <= index < 5", "[5]"]),
    "row before": ({"rows": [-6, 0]}, ValueError, ["rows", "-5 <= index < 5", "[-6, 0]"]),
    "head beyond": ({"heads": [0, 6]}, ValueError, ["heads", "-6 <= index < 6", "[0, 6]"]),
    "rows of floats": ({"rows": torch.tensor([0.5])}, TypeError, ["rows", "integer", "float32"]),
    "rows of bools": (
        {"rows": torch.tensor([True, False, True, False, False])},
        TypeError,
        ["rows", "integer", "bool"],
    ),
    "key of another batch": ({"key": zeros(1, 3, 7, 11)}, ValueError, ["batch size", "B = 2", "B = 1"]),
    "mask of another length": ({"mask": torch.ones(8, dtype=torch.bool)}, ValueError, ["(2, 6, 5, 7)", "(8,)"]),
    "softcap 0": ({"softcap": 0.0}, ValueError, ["softcap > 0"]),
    "sinks of key-value heads": ({"sinks": zeros(3)}, ValueError, ["(6,)", "(3,)"]),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_say_what_is_wrong(name: str) -> None:
    changed, error, fragments = WEIGHTS[name]
    (q, k, _), options = call(**changed)
    with pytest.raises(error) as caught:
        headwise.weights(q, k, **options)
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not say {missing}"


MAKERS: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "window 0": (lambda: headwise.window(0), ValueError, ["self included", "left >= 1 or None", "got 0"]),
    "window negative": (lambda: headwise.window(-1), ValueError, ["left >= 1 or None", "got -1"]),
    "window right negative": (lambda: headwise.window(2, -1), ValueError, ["right >= 0 or None", "got -1"]),
    "window of a fraction": (lambda: headwise.window(2.5), TypeError, ["window", "2.5"]),
    "window of a tensor": (lambda: headwise.window(torch.tensor(2)), TypeError, ["window", "Tensor"]),
    "offset of a fraction": (lambda: headwise.causal(offset=0.5), TypeError, ["offset", "0.5"]),
    "offset tensor of floats": (lambda: headwise.causal(offset=torch.tensor([0.5])), TypeError, ["offset", "float32"]),
    **{
        f"offset of {name} of no axes": (
            partial(make, offset=torch.tensor(3)),
            ValueError,
            [f"offset of {name}", "an int, or an integer tensor (B,)", "int64 ()", ".item() or .view(-1)"],
        )
        for name, make in {
            "causal()": headwise.causal,
            "window()": partial(headwise.window, 2),
            "dilated()": partial(headwise.dilated, 2),
            "blocks()": partial(headwise.blocks, 2),
            "alibi()": partial(headwise.alibi, zeros(6)),
            "relative()": partial(headwise.relative, zeros(6, 3)),
            "placed()": headwise.causal().placed,
        }.items()
    },
    "prefix of no axes": (lambda: headwise.prefix(torch.tensor(3)), ValueError, ["n of prefix()", "(B,)", "int64 ()"]),
    "length of no axes": (lambda: headwise.lengths(torch.tensor(3)), ValueError, ["stop", "(B,)", "int64 ()"]),
    "segments of no axes": (
        lambda: headwise.segments(torch.tensor([1]), torch.tensor(1)),
        ValueError,
        ["key_ids", "segments()", "(n,) or (B, n)", "int64 ()"],
    ),
    "offset far out": (
        lambda: headwise.causal(offset=2**40 + 1),
        ValueError,
        ["offset of causal()", "-2**40 to 2**40", "got 1099511627777"],
    ),
    "alibi's offset far out": (
        lambda: headwise.alibi(zeros(6), offset=-(10**400)),
        ValueError,
        ["offset of alibi()", "an integer of 1329 bits"],
    ),
    "window far out": (lambda: headwise.window(2**63), ValueError, ["left of window()", "2**40", "None sets no limit"]),
    "right far out": (lambda: headwise.window(1, 2**63), ValueError, ["right of window()", "2**40"]),
    "first far out": (
        lambda: headwise.window(1, first=2**63),
        ValueError,
        ["first is at most 2147483647", "got 9223372036854775808"],
    ),
    "alibi's offset of a fraction": (lambda: headwise.alibi(zeros(6), offset=0.5), TypeError, ["alibi()", "0.5"]),
    "keep of floats": (lambda: headwise.keep(zeros(3)), TypeError, ["keep()", "bool", "float32", "bias()"]),
    "keep of an array": (lambda: headwise.keep(np.ones(3, bool)), TypeError, ["keep()", "ndarray"]),
    "bias of bools": (lambda: headwise.bias(torch.ones(3, dtype=torch.bool)), TypeError, ["bias()", "bool", "keep()"]),
    "lengths of a list": (lambda: headwise.lengths([1, 2]), TypeError, ["lengths", "list"]),
    "lengths of floats": (
        lambda: headwise.lengths(torch.tensor([1.0, 2.0])),
        TypeError,
        ["lengths()", "integer", "float32", ".long()"],
    ),
    "segments of a list": (lambda: headwise.segments([1, 2]), TypeError, ["segments", "list"]),
    "alibi of integers": (
        lambda: headwise.alibi(torch.ones(6).long()),
        TypeError,
        ["alibi()", "(H,) or (B, H)", "int64"],
    ),
    "alibi of three axes": (lambda: headwise.alibi(zeros(1, 2, 6)), TypeError, ["(H,) or (B, H)", "(1, 2, 6)"]),
    "no slopes": (lambda: headwise.alibi_slopes(0), ValueError, ["num_heads is at least 1", "got 0"]),
    "joined with a tensor": (
        lambda: headwise.causal() & torch.ones(3, dtype=torch.bool),
        TypeError,
        ["keep()", "Tensor"],
    ),
    "joined with None": (lambda: headwise.causal() & None, TypeError, ["`&` joins masks", "NoneType"]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_masks_say_what_is_wrong_where_they_are_made(name: str) -> None:
    make, error, fragments = MAKERS[name]
    with pytest.raises(error) as caught:
        make()
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not say {missing}"


def test_what_is_right_at_the_edge_is_not_refused() -> None:
    """The refusals above are not the effect of refusing everything."""
    fine: list[dict[str, Any]] = [
        {},
        {"scale": 0},
        {"scale": -1},
        {"scale": np.float32(0.5)},
        {"scale": Fraction(1, 3)},
        {"softcap": np.float64(30)},
        {"softcap": 30},
        {"scale": -(2.0**100)},
        {"scale": 2.0**-100},
        {"softcap": 2.0**100},
        {"softcap": 2.0**-100},
        {"dropout": np.float32(0.5)},
        {"mask": headwise.causal(offset=2**40)},
        {"mask": headwise.alibi(zeros(6), offset=-(2**40))},
        {"softcap": 1e-6},
        {"dropout": 0},
        {"dropout": 0.999},
        {"sinks": zeros(6, dtype=torch.float64)},
        {"sinks": torch.full((6,), -math.inf)},
        {"gate": zeros(1)},
        {"gate": zeros(1, 6, 1, 13)},
        {"mask": torch.ones(7, dtype=torch.bool)},
        {"mask": torch.ones(2, 1, 1, 7, dtype=torch.bool)},
        {"mask": zeros(6, 1, 1, dtype=torch.float16)},
        {"mask": headwise.lengths(torch.tensor([-3, 99]))},
        {"mask": headwise.lengths(torch.tensor([4]))},
        {"mask": headwise.causal(offset=-99)},
        {"mask": headwise.window(99, 99)},
    ]
    for changed in fine:
        qkv, options = call(**changed)
        assert bool(headwise.attention(*qkv, **options).isfinite().all()), changed
        headwise.explain(*qkv, **options)


def test_lengths_beyond_the_keys_mean_all_of_them() -> None:
    ours = headwise.attention(Q, K, V, mask=headwise.lengths(torch.tensor([-3, 99])))
    assert bool((ours[0] == 0).all())
    torch.testing.assert_close(ours[1], headwise.attention(Q, K, V)[1], rtol=1e-6, atol=1e-6)
