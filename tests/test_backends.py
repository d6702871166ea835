"""Which backend runs a call: chosen openly, refused clearly, nothing dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backends import BACKENDS, ISAS, MUST, OPTIONAL, check_refusal
from mask_cases import SHORT
from test_meaning import EXTRAS, options_of

import headwise
from headwise.testing import assert_same_bits, make_qkv


@pytest.mark.parametrize("extra", EXTRAS)
def test_explain_tells_of_every_backend(extra: str) -> None:
    qkv = make_qkv(*SHORT)
    options = options_of(extra, SHORT)
    told = headwise.explain(*qkv, mask=headwise.causal(), **options)
    assert {told.backend, *told.others} == {*BACKENDS} - {"auto"}
    assert told.why and all(told.others.values())
    lines = str(told).splitlines()
    assert lines[0] == f"{told.backend}: {told.why}"
    assert lines[1:] == [f"  not {name}: {why}" for name, why in told.others.items()]
    assert_same_bits(
        headwise.attention(*qkv, mask=headwise.causal(), **options),
        headwise.attention(*qkv, mask=headwise.causal(), **options, backend=told.backend),
    )


def test_explain_computes_nothing() -> None:
    with headwise.testing.largest_tensor() as seen:
        headwise.explain(*make_qkv(1, 1, 1, 1, 1, 1, 1), mask=headwise.causal())
    assert seen.numel <= 16


def test_doubles_run_on_the_definition() -> None:
    assert headwise.explain(*make_qkv(*SHORT, dtype=torch.float64)).backend == "reference"


def test_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match=r"backend is auto, native, sdpa, flex, blocks, reference; got 'triton'"):
        headwise.attention(*make_qkv(*SHORT), backend="triton")


# What torch's kernels cannot honour: by name they must refuse, and never run without it.
CANNOT: dict[str, dict[str, dict[str, Any]]] = {
    "sdpa": {
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.zeros(SHORT.H)},
        "lse": {"return_lse": True},
        "dropout": {"dropout": 0.1},
        "bias that learns": {"mask": headwise.bias(torch.zeros(SHORT.T, SHORT.S, requires_grad=True))},
    },
    "flex": {
        "dropout": {"dropout": 0.1},
        "bias that learns": {"mask": headwise.bias(torch.zeros(SHORT.T, SHORT.S, requires_grad=True))},
    },
}


@pytest.mark.parametrize(("backend", "what"), [(b, what) for b, cases in CANNOT.items() for what in cases])
def test_what_a_backend_cannot_honour_it_refuses(backend: str, what: str) -> None:
    qkv, options = make_qkv(*SHORT), CANNOT[backend][what]
    with pytest.raises(ValueError, match="cannot serve this call") as refusal:
        headwise.attention(*qkv, **options, backend=backend)
    check_refusal(backend, str(refusal.value), headwise.explain(*qkv, **options))
    with pytest.raises(ValueError, match="cannot serve this call"):
        headwise.explain(*qkv, **options, backend=backend)


def test_flex_refuses_a_backward_on_the_cpu() -> None:
    with pytest.raises(ValueError, match="no backward on CPU"):
        headwise.attention(*make_qkv(*SHORT, requires_grad=True), backend="flex")


@pytest.mark.parametrize("backend", MUST)
@pytest.mark.parametrize("what", CANNOT["sdpa"])
def test_what_torch_cannot_do_runs_elsewhere(backend: str, what: str) -> None:
    headwise.attention(*make_qkv(*SHORT), **CANNOT["sdpa"][what], backend=backend)


def test_a_backend_asked_for_by_name_is_the_one_explained() -> None:
    qkv = make_qkv(*SHORT)
    for backend in (*MUST[1:], *(name for name in OPTIONAL if name != "native" or ISAS)):
        told = headwise.explain(*qkv, backend=backend)
        assert (told.backend, told.why) == (backend, "asked for by name")
        assert {backend, *told.others} == {*BACKENDS} - {"auto"}
