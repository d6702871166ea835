"""The probe: it sees every call as the kernel got it, leaves nothing behind, and is loud where it would see less."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.nn import AttentionCall, InnerAttention, MultiHeadAttention, Probe, Rotary, probe
from headwise.nn.head_views import join_heads
from headwise.ops.masks import Keep
from headwise.testing import assert_same_bits

B, T, S, M = 2, 5, 7, 12


class Model(nn.Module):
    """Two layers of self-attention, the first used twice, and one of cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                MultiHeadAttention(M, 6, num_kv_heads=3, rotary=Rotary(2), qk_norm=nn.RMSNorm),
                MultiHeadAttention(M, 4, inner=InnerAttention(softcap=5.0, sinks=torch.randn(4), dropout=0.25)),
            ]
        )
        self.cross = MultiHeadAttention(M, 3, memory_dim=8, inner=InnerAttention(scale=0.3))
        self.fails = False

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.layers[0](x, mask=headwise.causal())
        x = x + self.layers[1](x, mask=torch.ones(T, T, dtype=torch.bool).tril())
        if self.fails:
            raise ArithmeticError("planted")
        x = x + self.layers[0](x)
        return x + self.cross(x, memory, gate=torch.tensor([1.0, 0.0, 2.0]))


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, M), torch.randn(B, S, 8)


def hooks(model: nn.Module) -> list[Any]:
    """All that a probe could leave behind on a model: every attribute of every module but the parameters' numbers."""
    return [
        (name, sorted(vars(part)), len(part._forward_pre_hooks), len(part._forward_hooks), len(part._backward_hooks),
         len(part._forward_pre_hooks_with_kwargs), part.training)
        for name, part in model.named_modules()
    ]  # fmt: skip


def again(call: AttentionCall) -> Tensor:
    """What the inner part gave, from the call alone."""
    assert call.value is not None
    return headwise.attention(
        call.query, call.key, call.value, mask=call.mask, scale=call.scale, softcap=call.softcap, sinks=call.sinks,
        gate=call.gate,
    )  # fmt: skip


def test_every_call_is_seen_with_all_that_makes_its_result() -> None:
    model, arguments = Model().eval(), inputs()
    outs: dict[int, Tensor] = {}
    for name, part in model.named_modules():
        if isinstance(part, InnerAttention):
            part.register_forward_hook(lambda *a, n=name: outs.update({len(outs): a[-1]}))
    with probe(model) as seen:
        model(*arguments)
    assert [(call.module, call.order) for call in seen.calls] == [
        ("layers.0", 0),
        ("layers.1", 1),
        ("layers.0", 2),
        ("cross", 3),
    ]
    assert seen.seen == 4 and seen.expected == ("layers.0", "layers.1", "cross")
    first, second, _, cross = seen.calls
    assert first.query.shape == (B, 6, T, 2) and first.key.shape == (B, 3, T, 2) and cross.key.shape == (B, 3, S, 4)
    assert second.softcap == 5.0 and second.sinks is model.layers[1].inner.sinks and second.dropout == 0.0
    assert isinstance(second.mask, headwise.Mask) and isinstance(second.mask.parts[0], Keep)
    assert cross.scale == 0.3 and cross.mask is None and cross.gate is not None
    for call in seen.calls:
        assert_same_bits(again(call), outs[call.order])


def test_dropout_is_seen_as_it_runs() -> None:
    for training, dropout in ((True, 0.25), (False, 0.0)):
        model = Model().train(training)
        with probe(model) as seen:
            model(*inputs())
        assert seen.calls[1].dropout == dropout


def test_each_gets_the_calls_one_by_one_and_nothing_is_kept() -> None:
    model, got = Model(), []
    done: list[int] = []
    model.layers[1].register_forward_pre_hook(lambda *_: done.append(len(got)))
    with probe(model, got.append) as seen:
        model(*inputs())
    assert [call.order for call in got] == [0, 1, 2, 3]
    assert seen.calls == [] and seen.seen == 4
    assert done == [1]  # the first call had been handed over before the second layer ran


def test_the_model_is_left_as_it_was() -> None:
    model, arguments = Model().eval(), inputs()
    before, state, out = hooks(model), copy.deepcopy(model.state_dict()), model(*arguments)
    with probe(model) as seen:
        assert hooks(model) != before
        assert_same_bits(model(*arguments), out)
    assert len(seen.calls) == 4
    assert hooks(model) == before
    assert_same_bits(model(*arguments), out)
    assert len(seen.calls) == 4  # and it does not go on watching
    for name, value in model.state_dict().items():
        assert_same_bits(value, state[name], what=name)


def test_the_model_is_left_as_it_was_after_an_exception() -> None:
    model, arguments = Model(), inputs()
    before = hooks(model)
    model.fails = True
    with pytest.raises(ArithmeticError, match="planted"), probe(model):  # and not the probe's own complaint
        model(*arguments)
    assert hooks(model) == before
    model.fails = False

    def refuse(call: AttentionCall) -> None:
        raise ArithmeticError(f"at {call.module}")

    with pytest.raises(ArithmeticError, match=r"at layers\.0"), probe(model, refuse):
        model(*arguments)
    assert hooks(model) == before
    with probe(model) as seen:
        model(*arguments)
    assert len(seen.calls) == 4


def test_a_module_that_was_not_called_is_named() -> None:
    model = Model()
    before = hooks(model)
    with (
        pytest.raises(
            RuntimeError, match="1 of 3 attention modules were not called while the probe was open: 'cross'; run"
        ),
        probe(model),
    ):
        for layer in model.layers:
            layer(inputs()[0])
    assert hooks(model) == before
    five = nn.ModuleList(MultiHeadAttention(4, 2) for _ in range(5))
    with pytest.raises(RuntimeError, match=r"5 of 5 .*: '0', '1', '2', '3', '4'; run the whole model"), probe(five):
        pass
    many = nn.ModuleList(MultiHeadAttention(4, 2) for _ in range(7))
    with (
        pytest.raises(RuntimeError, match=r"7 of 7 .*: '0', '1', '2', '3', '4' and 2 more; run the whole model"),
        probe(many),
    ):
        pass


def test_latent_attention_is_seen() -> None:
    part = headwise.LatentAttention(12, 3, kv_lora_rank=7, nope_dim=5, rope_dim=2, value_dim=5)
    model = nn.ModuleDict({"latent": part})
    with probe(model) as seen:
        out = part(inputs()[0], mask=headwise.causal())
    [call] = seen.calls
    assert call.module == "latent" and call.query.shape[:3] == (B, 3, T)
    assert out.shape == (B, T, 12) and seen.expected == ("latent",)


def test_probes_can_be_nested() -> None:
    model = Model()
    with probe(model) as outer, probe(model.layers[0]) as inner:
        model(*inputs())
    assert [call.module for call in outer.calls] == ["layers.0", "layers.1", "layers.0", "cross"]
    assert [call.module for call in inner.calls] == ["", ""]


def test_modules_that_share_an_inner_part_are_told_apart() -> None:
    shared = InnerAttention()
    model = nn.Sequential(*(MultiHeadAttention(M, 3, inner=shared) for _ in range(3)))
    with probe(model) as seen:
        model(inputs()[0])
    assert [call.module for call in seen.calls] == ["0", "1", "2"]


def test_gradients_flow_through_what_was_seen() -> None:
    mha, x = MultiHeadAttention(M, 3), torch.randn(B, T, M)
    with probe(mha) as seen:
        out = mha(x)
    (grad,) = torch.autograd.grad(out.sum(), seen.calls[0].query)
    assert bool(grad.any())


def test_a_compiled_model_runs_uncompiled_and_is_seen() -> None:
    model = Model().eval()
    compiled, arguments = torch.compile(model, fullgraph=True), inputs()
    with probe(compiled) as seen:
        assert_same_bits(compiled(*arguments), model(*arguments))
    assert [call.module for call in seen.calls[:2]] == ["_orig_mod.layers.0", "_orig_mod.layers.1"]


def test_other_rooms_register_their_models() -> None:
    class Foreign(nn.Module):
        """Not on the list."""

    @probe.register
    def _(model: Foreign, each: Any = None) -> Any:
        return "theirs"

    assert probe(Foreign()) == "theirs"


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("imported", "way_out"),
    [
        (False, "for a transformers model, import headwise.hf first"),
        (True, "give a model that has some, or a transformers model on its attention interface"),
    ],
)
def test_a_model_without_attention_is_named(imported: bool, way_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headwise.hf", sys)
    if not imported:
        monkeypatch.delitem(sys.modules, "headwise.hf")
    text = f"Linear holds no headwise.MultiHeadAttention or LatentAttention, so there is nothing to probe; {way_out}"
    with pytest.raises(TypeError, match=f"{text}$"), probe(nn.Linear(2, 2)):
        pass
    with pytest.raises(TypeError, match=r"probe needs a torch\.nn\.Module, got str"), probe("model"):  # type: ignore[arg-type]
        pass


@pytest.mark.unchecked
def test_a_part_that_another_room_can_probe_is_named() -> None:
    class Foreign(nn.Module):
        """Another room's, inside of one's own model."""

    probe.register(Foreign, lambda model, each=None: None)
    model = nn.ModuleDict({"head": nn.Linear(2, 2), "body": nn.ModuleList([Foreign()])})
    text = "ModuleDict holds no .* nothing to probe; its part 'body.0' .Foreign. is a model of its own: probe that$"
    with pytest.raises(TypeError, match=text), probe(model):
        pass


class Mine(nn.Module):
    """An inner part that headwise cannot read."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Any) -> Tensor:
        return headwise.attention(query, key, value, mask=mask)


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (Mine(), "module '1': its inner part Mine does not say what it computes; derive it from headwise.nn.Inner"),
        (Mine().forward, "module '1': the inner part forward is a bare function and cannot say what it computes"),
    ],
)
def test_an_inner_part_that_cannot_be_read_is_refused_before_anything_runs(inner: Any, text: str) -> None:
    model = nn.Sequential(MultiHeadAttention(M, 3), MultiHeadAttention(M, 3, inner=inner))
    assert model(inputs()[0]).shape == (B, T, M)
    with pytest.raises(TypeError) as caught, probe(model):
        raise AssertionError("not reached")
    assert text in str(caught.value)


def test_calls_print_short() -> None:
    seen = Probe(())
    seen.record("layer", query=torch.zeros(1, 2, 3, 4), key=torch.zeros(1, 1, 5, 4))
    assert repr(seen.calls[0]) == "AttentionCall('layer', order=0, query=(1, 2, 3, 4), key=(1, 1, 5, 4), mask=None)"


# --- answers ----------------------------------------------------------------------------------------------------------


def test_what_each_returns_takes_the_place_of_the_attention() -> None:
    """Halved heads are what a gate of one half gives; the own attention is not computed; None changes no bit."""
    model, arguments = Model().eval(), inputs()
    before = hooks(model)
    ran: list[str] = []
    own = InnerAttention.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InnerAttention, "forward", lambda self, *a, **k: ran.append("own") or own(self, *a, **k))
        with probe(model, lambda call: 0.5 * call.attend() if call.module == "layers.0" else None) as seen:
            halved = model(*arguments)
    assert ran == ["own", "own"] and seen.seen == 4, "layers.1 and cross alone computed their own"
    gated = model.layers[0]
    plain = type(gated).forward
    gated.forward = lambda *a, **k: plain(gated, *a, gate=torch.full((6,), 0.5), **k)
    assert_same_bits(halved, model(*arguments))
    del gated.forward
    with probe(model, lambda call: call.attend()):
        assert_same_bits(model(*arguments), out := model(*arguments), what="the gate of the cross-attention included")
    with probe(model, lambda call: None):
        assert_same_bits(model(*arguments), out)
    assert hooks(model) == before


def test_gradients_flow_through_an_answer() -> None:
    mha, x = MultiHeadAttention(M, 3), torch.randn(B, T, M)
    gate = torch.ones(3, 1, 1, requires_grad=True)
    with probe(mha, lambda call: gate * call.attend()):
        (grad,) = torch.autograd.grad(mha(x).square().sum(), gate)
    step = 1e-3
    for h in range(3):
        moved = [mha(x, gate=torch.ones(3).index_fill(0, torch.tensor(h), 1 + s)).square().sum() for s in (step, -step)]
        torch.testing.assert_close(grad[h, 0, 0], (moved[0] - moved[1]) / (2 * step), rtol=2e-3, atol=1e-3)


def test_a_forward_of_the_users_own_is_put_back() -> None:
    mha, x = MultiHeadAttention(M, 3), torch.randn(B, T, M)

    def doubled(*args: Any, **keywords: Any) -> Tensor:
        out: Tensor = InnerAttention.forward(mha.inner, *args, **keywords)
        return 2 * out

    mha.inner.forward = doubled  # type: ignore[method-assign]
    expected = mha(x)
    with probe(mha, lambda call: None):
        assert torch.equal(mha(x), expected)
    assert vars(mha.inner)["forward"] is doubled and torch.equal(mha(x), expected)


def test_of_several_probes_the_last_opened_has_its_way() -> None:
    """And each sees the call, in the order in which they were opened."""
    model, x = MultiHeadAttention(M, 3).eval(), inputs()[0]
    seen: list[str] = []

    def saying(name: str, factor: float | None) -> Any:
        return lambda call: seen.append(name) or (None if factor is None else factor * call.attend())

    with probe(model) as before:
        model(x)
    doubled = model.o_proj(2 * join_heads(before.calls[0].attend()))
    with probe(model, saying("outer", 0.0)), probe(model, saying("middle", 2.0)), probe(model, saying("inner", None)):
        assert_same_bits(model(x), doubled)
    assert seen == ["outer", "middle", "inner"]


def test_modules_that_share_an_inner_part_get_their_own_answers() -> None:
    shared = InnerAttention()
    model = nn.Sequential(*(MultiHeadAttention(M, 3, inner=shared) for _ in range(3))).eval()
    with probe(model, lambda call: torch.zeros_like(call.query) if call.module == "1" else None):
        assert not bool(model(inputs()[0]).any())
        assert bool(model[0](inputs()[0]).any())


@pytest.mark.unchecked
def test_an_answer_that_does_not_fit_is_refused() -> None:
    mha, x = MultiHeadAttention(M, 3, value_dim=5), inputs()[0]
    before = hooks(mha)
    rule = "what `each` returns takes the place of the attention's output of module ''"
    fits = "(B, H, T, V) = (2, 3, 5, 5), torch.float32 on cpu, as call.attend() gives it; got"
    for answer, kind, text in (
        (True, TypeError, f"{rule}: a tensor (B, H, T, V), or None to leave it; got True"),
        (torch.zeros(B, 3, T, 4), ValueError, f"{rule}: {fits} float32 (2, 3, 5, 4) on cpu"),
        (torch.zeros(B, T, 3, 5), ValueError, f"{rule}: {fits} float32 (2, 5, 3, 5) on cpu"),
        (torch.zeros(B, 3, T, 5).double(), ValueError, f"{rule}: {fits} float64 (2, 3, 5, 5) on cpu"),
        (torch.zeros(B, 3, T, 5, device="meta"), ValueError, f"{rule}: {fits} float32 (2, 3, 5, 5) on meta"),
    ):
        with pytest.raises(kind) as caught, probe(mha, lambda call, answer=answer: answer):
            mha(x)
        assert text in str(caught.value), str(caught.value)
    assert hooks(mha) == before
    with torch.autocast("cpu", torch.bfloat16), probe(mha, lambda call: call.attend()) as seen:
        assert mha(x).dtype == torch.bfloat16 and seen.seen == 1
