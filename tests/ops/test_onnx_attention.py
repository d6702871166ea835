"""The published standard: every `Attention` case of onnx, through the op by every backend, and through `weights`."""

from __future__ import annotations

import pytest
import torch
from backends import MUST, NATIVE, attend
from loops import inside
from onnx_cases import COUNT, SHA256, TOLERANCE, cases, error, fingerprint, score_error

import headwise

CASES = {case.name: case for case in cases()}
ALL = pytest.mark.parametrize("name", CASES)


def test_the_suite_is_the_one_we_know() -> None:
    assert len(CASES) == COUNT
    assert fingerprint() == SHA256, "onnx's cases changed: read what changed, then freeze the new hash"


# Flex traces every call (0.2 s): every form of mask, window, cache, group and softcap once.
FEW = ["4d_fp16", "4d_attn_mask_3d_causal", "4d_attn_mask_bool_4d", "4d_diff_heads_with_past_and_present_mask4d",
       "4d_gqa_softcap", "3d_gqa_causal", "4d_causal_padded_kv_bf16", "4d_causal_nonpad_batch_prefill",
       "bidirectional_window", "local_window_ext_cache_rank3_head_mask", "local_window_gqa_rank4_mask"]  # fmt: skip


@pytest.mark.sweep
@pytest.mark.unchecked
@pytest.mark.parametrize("name", FEW)
def test_output_by_flex(name: str) -> None:
    case = CASES[name]
    qkv, options = case.call()
    out = headwise.attention(*qkv, **options, backend="flex")
    assert error(case.joined(out), case.outputs["Y"]) <= TOLERANCE[case.dtype]


@ALL
@inside("backend", [*MUST, "sdpa", *NATIVE])
def test_output(name: str, backend: str) -> None:
    case = CASES[name]
    qkv, options = case.call()
    out = attend(backend, *qkv, **options)
    if out is None:  # a clear refusal by name, which `attend` checked; never by a backend of MUST
        return
    assert out.dtype == case.dtype
    assert error(case.joined(out), case.outputs["Y"]) <= TOLERANCE[case.dtype]


def test_torchs_kernel_does_not_refuse_its_way_through() -> None:
    """It has no softcap (12 cases), and rounds by thread count where few rows are asked for."""
    ran = 0
    for case in cases():
        qkv, options = case.call()
        ran += attend("sdpa", *qkv, **options) is not None
    assert ran >= 70


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "qk_matmul_output" in c.outputs])
def test_scores(name: str) -> None:
    case = CASES[name]
    assert score_error(case) <= TOLERANCE[case.dtype]


def test_every_stage_is_covered() -> None:
    captured = [case for case in cases() if "qk_matmul_output" in case.outputs]
    assert len(captured) == 18
    assert {case.stage for case in captured} == {"raw", "softcapped", "biased", "probabilities"}


@inside("name", CASES)
def test_present_is_past_and_new(name: str) -> None:
    case = CASES[name]
    (_, key, value), _ = case.call()
    for present, ours in (("present_key", key), ("present_value", value)):
        if present in case.outputs:
            assert torch.equal(ours, case.outputs[present])


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
