"""The published standard: every `Attention` case of onnx, through the op by every backend, and through `weights`."""

from __future__ import annotations

import pytest
import torch
from backends import attend, every_backend
from onnx_cases import COUNT, SHA256, TOLERANCE, cases, error, fingerprint, score_error

import headwise

CASES = {case.name: case for case in cases()}
ALL = pytest.mark.parametrize("name", CASES)


def test_the_suite_is_the_one_we_know() -> None:
    assert len(CASES) == COUNT
    assert fingerprint() == SHA256, "onnx's cases changed: read what changed, then freeze the new hash"


@every_backend
@ALL
def test_output(name: str, backend: str) -> None:
    case = CASES[name]
    qkv, options = case.call()
    out = attend(backend, *qkv, **options)
    if out is None:  # a clear refusal by name, which `attend` checked; never by a backend of MUST
        return
    assert out.dtype == case.dtype
    assert error(case.joined(out), case.outputs["Y"]) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize(("backend", "least"), [("sdpa", 75), pytest.param("flex", 75, marks=pytest.mark.unchecked)])
def test_a_backend_does_not_refuse_its_way_through(backend: str, least: int) -> None:
    ran = 0
    for case in cases():
        qkv, options = case.call()
        ran += attend(backend, *qkv, **options) is not None
    assert ran >= least


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "qk_matmul_output" in c.outputs])
def test_scores(name: str) -> None:
    case = CASES[name]
    assert score_error(case) <= TOLERANCE[case.dtype]


def test_every_stage_is_covered() -> None:
    captured = [case for case in cases() if "qk_matmul_output" in case.outputs]
    assert len(captured) == 18
    assert {case.stage for case in captured} == {"raw", "softcapped", "biased", "probabilities"}


@ALL
def test_present_is_past_and_new(name: str) -> None:
    case = CASES[name]
    (_, key, value), _ = case.call()
    for given, ours in (("present_key", key), ("present_value", value)):
        if given in case.outputs:
            assert torch.equal(ours, case.outputs[given])


@pytest.mark.parametrize(
    ("fault", "killed_by"),
    [
        (lambda o: {**o, "softcap": None}, "4d_softcap"),
        (lambda o: {**o, "scale": None}, "4d_scaled"),
        (lambda o: {**o, "mask": headwise.causal()}, "4d_causal"),  # bottom-right where ONNX is top-left
        (lambda o: {**o, "mask": None}, "4d_diff_heads_mask4d_padded_kv"),
        (lambda o: {**o, "mask": headwise.window(2, offset=0)}, "local_window"),  # self not counted
    ],
)
def test_the_suite_can_fail(fault, killed_by: str) -> None:  # type: ignore[no-untyped-def]
    case = CASES[killed_by]
    qkv, options = case.call()
    assert error(case.joined(headwise.attention(*qkv, **fault(options))), case.outputs["Y"]) > 1e-3
