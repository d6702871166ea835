"""torch.onnx.export(dynamo=True), then onnxruntime: the same numbers, at sizes that the export has not seen.

test_onnx_export.py runs this in a process of its own, without the shape checker, whose wrappers torch.export cannot
trace. An export takes seconds, so that one program holds many calls.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from draw import drawn
from torch import Tensor, nn

import headwise
from headwise.testing import make_qkv

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter's own, of several kinds
OPEN = torch.export.Dim.DYNAMIC
H, K, D, V = 6, 2, 8, 12


def exported(
    net: nn.Module, given: tuple[Tensor, ...], axes: Sequence[Mapping[int, Any]], opset: int
) -> onnx.ModelProto:
    program = torch.onnx.export(
        net.eval(), given, dynamo=True, verbose=False, opset_version=opset, dynamic_shapes=tuple(axes)
    )
    file = io.BytesIO()
    program.save(file)
    return onnx.load_from_string(file.getvalue())


def ran(model: onnx.ModelProto, given: Sequence[Tensor]) -> list[Tensor]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [x.name for x in session.get_inputs()]
    return [torch.from_numpy(x) for x in session.run(None, dict(zip(names, (x.numpy() for x in given), strict=True)))]


def compare(net: nn.Module, model: onnx.ModelProto, given: tuple[Tensor, ...]) -> None:
    """Held against the same model in float64: onnxruntime is at most a few times as far from it as torch is."""
    with torch.no_grad():
        ours = net(*given)
        exact = net.double()(*(x.double() if x.is_floating_point() else x for x in given))
        net.float()
    for name, x, its, right in zip(names(net, len(ours)), ours, ran(model, given), exact, strict=True):
        assert its.shape == x.shape, name
        scale = float(right.abs().max())
        limit = 4 * float((x.double() - right).abs().max()) + 16 * torch.finfo(torch.float32).eps * scale
        assert float((its.double() - right).abs().max()) <= limit, name


def names(net: nn.Module, n: int) -> Sequence[str]:
    return getattr(net, "names", [str(i) for i in range(n)])


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


class Calls(nn.Module):
    """Attention under every kind of option, or a drawn share of them, for each takes seconds to export."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sinks", torch.linspace(-1, 1, H))
        every = list(self.options(*make_qkv(2, H, K, 5, 7, D, V)))
        self.names = list(dict.fromkeys(["causal", "empty rows", *drawn(every, most=12)]))

    def options(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, dict[str, Any]]:
        T, S = q.shape[2], k.shape[2]
        i, j = torch.arange(T)[:, None], torch.arange(S)
        distance = (i - j).abs().to(q.dtype)
        return {
            "plain": {},
            "causal": {"mask": headwise.causal()},
            "window": {"mask": headwise.window(3)},
            "empty rows": {"mask": headwise.causal(offset=-2)},
            "bool tensor": {"mask": (i + j) % 3 != 1},
            "bias": {"mask": headwise.bias(-0.5 * distance)},
            "alibi": {"mask": headwise.causal() & headwise.alibi(self.sinks.abs())},
            "rule": {"mask": headwise.rule(lambda b, h, i, j: (i + j + h) % 3 != 1)},
            "scale": {"scale": 0.25},
            "softcap": {"softcap": 2.0, "mask": headwise.causal()},
            "sinks": {"sinks": self.sinks, "mask": headwise.window(3)},
            "gate": {"gate": self.sinks, "mask": headwise.window(4)},
        }

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        options = self.options(q, k, v)
        return tuple(headwise.attention(q, k, v, **options[name]) for name in self.names)


@pytest.mark.sweep
@pytest.mark.parametrize("opset", [18, 23])
def test_the_op(opset: int) -> None:
    """With torch's fused kernel where it serves, which is one operator, `Attention`, from opset 23 on."""
    net, given = Calls(), make_qkv(2, H, K, 5, 7, D, V)
    model = exported(net, given, [{0: OPEN, 2: OPEN}] * 3, opset)
    assert not [node.domain for node in model.graph.node if node.domain]
    attends = [name for name in net.names if name not in ("softcap", "sinks")]
    assert operators(model)["Attention"] == (len(attends) if opset >= 23 else 0)
    for B, T, S in ((2, 5, 7), (3, 17, 13), (1, 31, 37)):
        compare(net, model, make_qkv(B, H, K, T, S, D, V))
    q, k, v = make_qkv(3, H, K, 11, 13, D, V)
    k[:, :, -1], v[:, :, -1] = torch.nan, torch.inf  # which the last row alone may attend, of causal()
    out = dict(zip(net.names, ran(model, (q, k, v)), strict=True))["causal"]
    assert out[:, :, -1].isnan().all() and out[:, :, :-1].isfinite().all()


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = headwise.MultiHeadAttention(24, 6, num_kv_heads=2, rotary=headwise.nn.Rotary(4))
        self.plain = headwise.MultiHeadAttention(24, 3)
        self.latent = headwise.LatentAttention(24, 3, kv_lora_rank=16, nope_dim=8, rope_dim=4, value_dim=8)

    def forward(self, x: Tensor, memory: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        return (
            self.mha(x, mask=headwise.causal()),
            self.mha(x, mask=headwise.window(3) & headwise.lengths(lengths)),
            self.plain(x, memory),
            self.latent(x, mask=headwise.causal()),
        )


def test_modules() -> None:
    """Self-attention with padding and a window, cross-attention, latent attention."""
    torch.manual_seed(0)

    def given(B: int, T: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(B, T, 24), torch.randn(B, S, 24), torch.arange(B) * 3 % T

    net = Modules()
    model = exported(net, given(2, 5, 7), [{0: OPEN, 1: OPEN}, {0: OPEN, 1: OPEN}, {0: OPEN}], 23)
    assert operators(model)["Attention"] == 4
    for sizes in ((2, 5, 7), (3, 17, 11)):
        compare(net, model, given(*sizes))


class Model(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        # With positions for each row: onnxscript makes `RotaryEmbedding` of rotary positions from opset 23 on, which
        # takes no positions that are shared by the rows of a batch (onnxscript 0.7.2, onnxruntime 1.32).
        places = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
        return (self.model(input_ids=ids, attention_mask=keep, position_ids=places).last_hidden_state,)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    import headwise.hf  # noqa: F401

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_hidden_layers": 2}
    if family == "llama":
        config = transformers.LlamaConfig(vocab_size=11, num_key_value_heads=2, head_dim=4, use_cache=False, **sizes)
        model = transformers.LlamaModel._from_config(config, attn_implementation="headwise")
    else:
        config = transformers.BertConfig(vocab_size=11, max_position_embeddings=32, **sizes)
        model = transformers.BertModel._from_config(config, attn_implementation="headwise")

    def given(B: int, T: int) -> tuple[Tensor, Tensor]:
        keep = torch.ones(B, T, dtype=torch.long)
        keep[0, -2:] = 0  # padding
        return torch.arange(B * T).view(B, T) % 11, keep

    net = Model(model)
    model = exported(net, given(2, 5), [{0: OPEN, 1: OPEN}] * 2, 23)
    assert operators(model)["Attention"] == 2
    for B, T in ((2, 5), (3, 17)):
        compare(net, model, given(B, T))
