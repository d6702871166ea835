"""`headwise.nn.replace` in torch's layers: called in every mode, nested tensors, what is kept, compiled."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.nn import replace

B, S, H, M, KDIM = 2, 7, 3, 33, 13


class Both(nn.Module):
    """`torch.nn.Transformer`, called with a target of another length and masks of all kinds."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inside = nn.Transformer(M + 3, 4, 2, 2, 19, dropout=0.0, **options)
        self.batch_first = self.inside.batch_first

    def forward(self, x: Tensor, padded: Tensor | None, hide: Tensor | None) -> Tensor:
        target = x[:, :-2] if self.batch_first else x[:-2]
        n = target.shape[1 if self.batch_first else 0]
        ahead = nn.Transformer.generate_square_subsequent_mask(n)
        return self.inside(x, target, hide, ahead, src_key_padding_mask=padded, memory_key_padding_mask=padded)


class Encoder(nn.Module):
    def __init__(self, nested: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(M + 3, 4, 19, dropout=0.0, **options)
        self.inside = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.batch_first = layer.self_attn.batch_first

    def forward(self, x: Tensor, padded: Tensor | None, hide: Tensor | None) -> Tensor:
        return self.inside(x, hide, padded)


STACKS: dict[str, Callable[[], Any]] = {
    "encoder": lambda: Encoder(batch_first=True),
    "encoder, norm first": lambda: Encoder(False, batch_first=True, norm_first=True, activation="gelu"),
    "encoder, (T, B, M)": lambda: Encoder(False),
    "both": lambda: Both(batch_first=True),
    "both, (T, B, M)": lambda: Both(),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The layers that were called since, by their fused form or by ours. Hooks would keep torch from its fused form."""
    called: list[str] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *args, **keywords: called.append(name) or function(*args, **keywords)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", noted("fused", torch._transformer_encoder_layer_fwd))
    kind = headwise.nn.drop_in.DropInMultiheadAttention
    monkeypatch.setattr(kind, "_project", noted("ours", kind._project))
    yield called


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("masked", ["", "padded", "causal"])
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("kind", STACKS)
def test_layers_of_torch_call_ours_in_every_mode(kind: str, mode: str, masked: str, calls: list[str]) -> None:
    model = STACKS[kind]().train(mode == "train")
    x = torch.randn(*((B, S) if model.batch_first else (S, B)), M + 3)
    padded = (torch.arange(S) >= torch.tensor([[S - 3], [S]])) if masked == "padded" else None
    hide = nn.Transformer.generate_square_subsequent_mask(S) if masked == "causal" else None
    with torch.set_grad_enabled(mode != "inference"):
        expected = model(x, padded, hide)
        calls.clear()
        ours = replace(copy.deepcopy(model))
        out = ours(x, padded, hide)
    assert calls == ["ours"] * sum(isinstance(part, nn.MultiheadAttention) for part in model.modules())
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_keep_their_lengths(calls: list[str]) -> None:
    encoder = Encoder(batch_first=True).eval()
    with torch.no_grad():
        x, ours = torch.randn(3, S, M + 3), replace(copy.deepcopy(encoder))
        padded = torch.arange(S) >= torch.tensor([[S], [2], [0]])
        expected = encoder(x, padded, None)
        calls.clear()
        out = ours(x, padded, None)
    assert calls == ["ours", "ours"] and not out[1, 2:].any() and not out[2].any() and bool(out[1, :2].all())
    torch.testing.assert_close(out[:2], expected[:2], rtol=1e-4, atol=1e-4)
    attend, nested = ours.inside.layers[0].self_attn, torch.nested.nested_tensor([x[0, :3], x[1, :5]])
    with pytest.raises(ValueError, match="brings its own padding"):
        attend(nested, nested, nested, key_padding_mask=padded)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_is_there_stays_there() -> None:
    """In place: parameters, names, hooks, modes, tied modules, and instances of torch's class."""
    encoder = Encoder(batch_first=True, nested=False)
    first, second = encoder.inside.layers[0], encoder.inside.layers[1]
    second.self_attn = first.self_attn  # tied
    first.self_attn.eval()
    seen: list[int] = []
    first.self_attn.register_forward_hook(lambda *_: seen.append(1))
    before, parameters = copy.deepcopy(encoder.state_dict()), dict(encoder.named_parameters())
    assert replace(encoder) is encoder and replace(encoder) is encoder
    assert first.self_attn is second.self_attn and isinstance(first.self_attn, nn.MultiheadAttention)
    assert not first.self_attn.training and not first.self_attn.inner.training and encoder.training
    assert all(parameter is parameters[name] for name, parameter in encoder.named_parameters())
    assert encoder.state_dict().keys() == before.keys()
    encoder(torch.randn(B, S, M + 3), None, None)
    assert seen == [1, 1]
    attend = replace(nn.MultiheadAttention(M, H))
    fresh = nn.MultiheadAttention(M, H)
    fresh.load_state_dict(attend.state_dict())
    attend.load_state_dict(nn.MultiheadAttention(M, H).state_dict())
    attend._reset_parameters()
    built = type(attend)(M, H, 0.2, kdim=KDIM, add_bias_kv=True)
    assert (
        built.dropout == 0.2 and built.k_proj_weight.shape == (M, KDIM) and type(attend)(M, H).in_proj_weight.ndim == 2
    )


@pytest.mark.slow
@pytest.mark.unchecked
def test_compiled_in_one_graph() -> None:
    encoder, x = replace(Encoder(batch_first=True, nested=False)), torch.randn(B, S, M + 3)
    padded = torch.arange(S) >= torch.tensor([[S - 2], [S]])
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    out, expected = compiled(x, padded, None), encoder(x, padded, None)
    torch.testing.assert_close(out, expected)
    parameters = list(encoder.parameters())
    for one, other in zip(*(torch.autograd.grad(y.sin().sum(), parameters) for y in (out, expected)), strict=True):
        torch.testing.assert_close(one, other)
