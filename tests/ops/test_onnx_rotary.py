"""The eight published `RotaryEmbedding` cases of onnx 1.23.2, through `rotate`. Nobody of this project wrote them."""

import hashlib
import warnings
from functools import cache
from typing import Any, NamedTuple

import onnx_cases
import pytest
from torch import Tensor

from headwise.nn import rotate

NAMES = (
    "",
    "_3d_input",
    "_interleaved",
    "_no_position_ids",
    "_no_position_ids_interleaved",
    "_no_position_ids_rotary_dim",
    "_with_interleaved_rotary_dim",
    "_with_rotary_dim",
)
FINGERPRINT = "c46f13cc2325f362c63b1247ca76500ee7218da99d52bb6f080474318ba16814"


class Case(NamedTuple):
    """One case: inputs and output by the operator's names for them, and its attributes."""

    inputs: dict[str, Tensor]
    output: Tensor
    attributes: dict[str, int]


@cache
def cases() -> dict[str, Case]:
    """By name, without the common "test_rotary_embedding"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import onnx.backend.test.case.node.rotaryembedding  # (making the cases is what importing it does)
        from onnx.backend.test.case.node import _NodeTestCases as made
    import onnx.helper

    by_name: dict[str, Case] = {}
    for case in made:
        if not case.name.startswith("test_rotary_embedding") or "expanded" in case.name:
            continue
        node: Any = case.model.graph.node[0]
        arrays, outputs = case.data_sets[0]
        inputs = {name: onnx_cases.torch_of(array) for name, array in zip(node.input, arrays, strict=True)}
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        by_name[case.name.removeprefix("test_rotary_embedding")] = Case(
            inputs, onnx_cases.torch_of(outputs[0]), attributes
        )
    return by_name


def rotated(case: Case) -> Tensor:
    """The case in headwise's terms: heads split, the caches read at the positions, the rest a call of `rotate`."""
    x = case.inputs["input"]
    flat = x.ndim == 3
    if flat:  # (B, T, H * D)
        x = x.unflatten(2, (case.attributes["num_heads"], -1)).transpose(1, 2)
    angles = [case.inputs[name] for name in ("cos_cache", "sin_cache")]
    if "position_ids" in case.inputs:
        angles = [cache[case.inputs["position_ids"]] for cache in angles]
    cos, sin = (a[:, None] for a in angles)  # (B, 1, T, R)
    assert case.attributes.get("rotary_embedding_dim", x.shape[-1]) == 2 * cos.shape[-1]
    out = rotate(x, cos, sin, interleaved=bool(case.attributes.get("interleaved", 0)))
    return out.transpose(1, 2).flatten(2) if flat else out


def test_all_eight_cases_are_there_and_unchanged() -> None:
    assert sorted(cases()) == sorted(NAMES)
    digest = hashlib.sha256()
    for name, case in sorted(cases().items()):
        digest.update(repr((name, sorted(case.attributes.items()))).encode())
        for slot, x in case.inputs.items():
            digest.update(repr((slot, str(x.dtype), tuple(x.shape))).encode() + x.numpy().tobytes())
    assert digest.hexdigest() == FINGERPRINT


@pytest.mark.parametrize("name", NAMES)
def test_rotate_gives_the_published_output(name: str) -> None:
    case = cases()[name]
    assert onnx_cases.error(rotated(case), case.output) <= 1e-6
