"""A model with headwise's attention goes to ONNX and runs in onnxruntime: see onnx_exports.py."""

from __future__ import annotations

import fresh
import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("onnxscript", reason="onnxscript, by which torch.onnx exports, is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def test_models_go_to_onnx() -> None:
    """The tests of onnx_exports.py, in a process without the shape checker."""
    ran = fresh.run_unchecked("onnx_exports.py")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-5000:] + ran.stderr[-1000:]
