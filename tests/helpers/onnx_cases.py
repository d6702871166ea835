"""The 93 `Attention` cases of onnx 1.23.2, read in headwise's terms. Nobody of this project wrote them.

onnx generates the cases in memory, from a fixed seed; their outputs come from onnx's own reference. Every
difference of convention is converted here, at the edge, so that the op has one meaning:

- causal without a cache is top-left there; with past keys, or with `nonpad_kv_seqlen`, it is offset (per batch row);
- `left_window_size` counts the keys before self, `window(left)` counts self too; -1 is no limit there, None here;
- a mask may be shorter than the keys: what it leaves out may not be attended;
- inputs may be (batch, length, heads * size), with the head counts as attributes.

`python -m tests.onnx_cases` prints the worst error by backend and dtype.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from operator import and_
from typing import Any

import numpy as np
import torch
from torch import Tensor

import headwise

COUNT = 93
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
STAGES = ("raw", "softcapped", "biased", "probabilities")  # qk_matmul_output_mode 0 to 3
# Names, attributes, dtypes, shapes and bytes of all inputs of all cases (outputs depend on the machine's last bit).
SHA256 = "6985766342061ac6c7d6ed434ef4a066a8bf6a7cbc820d8c43ebdcaa4a9636ce"


@dataclass(frozen=True)
class Case:
    """One case: tensors by the names of the operator's schema, empty optional ones left out."""

    name: str
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    attributes: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs["Q"].dtype

    def call(self) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
        """(query, key, value) and the keyword arguments of `headwise.attention` that say the same."""
        heads = [self.attributes.get(name) for name in ("q_num_heads", "kv_num_heads", "kv_num_heads")]
        q, k, v = (_split(self.inputs[name], count) for name, count in zip("QKV", heads, strict=True))
        if "past_key" in self.inputs:
            k, v = torch.cat([self.inputs["past_key"], k], 2), torch.cat([self.inputs["past_value"], v], 2)
        options = {"mask": self._mask(q.shape[2], k.shape[2]), "scale": self.attributes.get("scale")}
        options["softcap"] = self.attributes.get("softcap") or None  # 0 means none there
        return (q, k, v), options

    def _mask(self, T: int, S: int) -> headwise.Mask | None:
        nonpad = self.inputs.get("nonpad_kv_seqlen")
        past = self.inputs["past_key"].shape[2] if "past_key" in self.inputs else 0
        offset = past if nonpad is None else nonpad - T
        left, right = (self.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
        parts = []
        if self.attributes.get("is_causal"):
            parts.append(headwise.causal(offset=offset))
        if left >= 0 or right >= 0:
            parts.append(headwise.window(left + 1 if left >= 0 else None, right if right >= 0 else None, offset=offset))
        if nonpad is not None:
            parts.append(headwise.lengths(nonpad))
        if (mask := self.inputs.get("attn_mask")) is not None:
            flag = mask.dtype == torch.bool
            missing = (0, S - mask.shape[-1])
            full = torch.nn.functional.pad(mask, missing, value=False if flag else -torch.inf)
            parts.append(headwise.keep(full) if flag else headwise.bias(full))
        return reduce(and_, parts) if parts else None

    def joined(self, out: Tensor) -> Tensor:
        """An output (B, H, T, V) in the case's own layout."""
        return out.transpose(1, 2).flatten(2) if self.inputs["Q"].ndim == 3 else out

    @property
    def stage(self) -> str:
        """Which scores the case's `qk_matmul_output` holds."""
        return STAGES[self.attributes.get("qk_matmul_output_mode", 0)]


def _split(x: Tensor, num_heads: int | None) -> Tensor:
    return x if x.ndim == 4 else x.unflatten(2, (num_heads, -1)).transpose(1, 2)


@cache
def cases() -> tuple[Case, ...]:
    """All cases, in onnx's order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx's reference computes, and expects, -inf minus -inf
        import onnx.backend.test.case.node.attention  # noqa: F401  (making the cases is what importing it does)
        from onnx.backend.test.case.node import _NodeTestCases as made
    wanted = [c for c in made if c.name.startswith("test_attention") and "expanded" not in c.name]
    return tuple(_read(c) for c in wanted)


def _read(made: Any) -> Case:
    import onnx.defs
    import onnx.helper

    node = made.model.graph.node[0]
    schema = onnx.defs.get_schema("Attention")
    tensors = [
        {i.name: torch_of(x) for i, x in zip(infos, arrays, strict=True)}
        for infos, arrays in zip((made.model.graph.input, made.model.graph.output), made.data_sets[0], strict=True)
    ]
    inputs = {slot.name: tensors[0][name] for slot, name in zip(schema.inputs, node.input, strict=False) if name}
    outputs = {slot.name: tensors[1][name] for slot, name in zip(schema.outputs, node.output, strict=False) if name}
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return Case(made.name.removeprefix("test_attention_"), inputs, outputs, attributes)


def torch_of(array: np.ndarray[Any, Any]) -> Tensor:
    """A numpy array as a tensor; numpy has no bfloat16 of its own, so that one goes through float32 (exactly)."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))


def fingerprint() -> str:
    """One hash over all inputs, so that another onnx release cannot change the suite unseen."""
    digest = hashlib.sha256()
    for case in cases():
        digest.update(repr((case.name, sorted(case.attributes.items()))).encode())
        for name, x in case.inputs.items():
            digest.update(repr((name, str(x.dtype), tuple(x.shape))).encode())
            digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest absolute difference; 0 where both are the same infinity, infinite for a NaN or another shape."""
    if ours.shape != theirs.shape:
        return torch.inf
    left, right = ours.double(), theirs.double()
    apart = (left - right).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return float(torch.where(left == right, 0.0, apart).max())


def score_error(case: Case) -> float:
    """`headwise.weights` against the case's captured scores."""
    (q, k, _), options = case.call()
    return error(headwise.weights(q, k, stage=case.stage, **options), case.outputs["qk_matmul_output"])


def output_error(case: Case, backend: str = "auto") -> float:
    """`headwise.attention` against the case's Y."""
    qkv, options = case.call()
    return error(case.joined(headwise.attention(*qkv, **options, backend=backend)), case.outputs["Y"])


def worst(measure: Callable[[Case], float]) -> dict[torch.dtype, tuple[float, str, int]]:
    """By dtype: the largest error, the case that has it, and how many cases ran. A refusal ends it."""
    table: dict[torch.dtype, tuple[float, str, int]] = {}
    for case in cases():
        now = (measure(case), case.name)
        before = table.get(case.dtype, (-1.0, "", 0))
        table[case.dtype] = (*max(before[:2], now), before[2] + 1)
    return table


def main() -> None:
    """Print the worst error by backend and dtype."""
    for backend in ("auto", "reference", "blocks"):
        for dtype, (most, name, count) in worst(lambda c, b=backend: output_error(c, b)).items():  # type: ignore[misc]
            print(f"{backend:10} {str(dtype)[6:]:9} {count:3} cases, worst {most:.2e} ({name})")


if __name__ == "__main__":
    main()
