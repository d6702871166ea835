"""`headwise.hf.fast_decode`: the same model, its steps of a few rows in the native kernel; all else as it was."""

from __future__ import annotations

import copy
import mmap
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from backends import needs_native
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import headwise.hf
from headwise.cache import huge_pages
from headwise.hf.decode import fast_decode
from headwise.nn.decode import fast_linear
from headwise.testing import assert_same_bits

pytestmark = needs_native


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "CACHED", 0)


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=56, intermediate_size=71, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=97, head_dim=14,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).eval()


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """The shapes of the inputs that the kernel took."""
    shapes: list[torch.Size] = []
    inner = fast_linear.few_rows

    def spy(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        out = inner(input, weight, bias)
        if out is not None:
            shapes.append(input.shape)
        return out

    with monkeypatch.context() as patch:
        patch.setattr(fast_linear, "few_rows", spy)
        yield shapes


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_a_step_is_as_near_to_float64_as_torch_is(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(dtype)
    ids = torch.randint(0, 97, (3, 1), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = model(ids).logits
        with counted(monkeypatch) as shapes, headwise.hf.fast_decode(model):
            fast = model(ids).logits
        exact = copy.deepcopy(model).double()(ids).logits
    error, before = (fast - exact).abs().mean(), (plain - exact).abs().mean()
    assert len(shapes) == 15
    assert error <= 1.25 * before + 1e-7


def test_generation_steps_run_in_the_kernel_and_prompts_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    ids = torch.randint(0, 97, (2, 11), generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **options)
    with counted(monkeypatch) as shapes, headwise.hf.fast_decode(model) as fast:
        assert torch.equal(model.generate(ids, **options), plain)
    assert len(fast.taken) == 15 and fast.left == {}
    assert {shape[:2] for shape in shapes} == {(2, 1)}
    # the head over the vocabulary reads the prompt's last token alone
    assert len(shapes) == 6 * 15 + 1


def test_training_autocast_and_many_rows_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    ids = torch.randint(0, 97, (1, 5), generator=torch.Generator().manual_seed(7))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    before = gradients()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        cast = model(ids).logits
    with counted(monkeypatch) as shapes, headwise.hf.fast_decode(model):
        for x, y in zip(gradients(), before, strict=True):
            assert_same_bits(x, y)
        with torch.inference_mode():
            with torch.autocast("cpu", torch.bfloat16):
                assert_same_bits(model(ids).logits, cast)
            model(torch.zeros(3, 3, dtype=torch.long))
    assert shapes == []


def test_hooks_run_and_state_stays() -> None:
    model = llama()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    seen: list[torch.Size] = []
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    with torch.inference_mode(), headwise.hf.fast_decode(model):
        model(torch.zeros(1, 1, dtype=torch.long))
        assert seen == [(1, 1, 71)]
        assert list(model.state_dict()) == list(state)
        handle.remove()  # pickle does not take a lambda
        again = pickle.loads(pickle.dumps(model))
        assert_same_bits(
            again(torch.zeros(1, 1, dtype=torch.long)).logits, model(torch.zeros(1, 1, dtype=torch.long)).logits
        )
    for name, x in model.state_dict().items():
        assert_same_bits(x, state[name])
    assert {type(x) for x in model.modules() if isinstance(x, nn.Linear)} == {nn.Linear}


def test_what_is_left_says_why() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleDict({
        "plain": nn.Linear(3, 5), "own": Own(3, 5), "wide": nn.Linear(3, 5).double(), "hooked": nn.Linear(3, 5),
    })  # fmt: skip
    model["hooked"].forward = lambda input: input
    with headwise.hf.fast_decode(model) as fast:
        assert fast.taken == ("plain",)
        assert {name: type(model[name]) for name in model} == {
            "plain": fast_linear.FastLinear, "own": Own, "wide": nn.Linear, "hooked": nn.Linear,
        }  # fmt: skip
        assert "Own" in fast.left["own"] and "float64" in fast.left["wide"] and "forward" in fast.left["hooked"]
        with pytest.raises(headwise.hf.ModelError, match="another fast_decode"):
            headwise.hf.fast_decode(model["plain"])
    assert type(model["plain"]) is nn.Linear
    config = GPT2Config(n_embd=24, n_head=3, n_layer=1, vocab_size=11, n_positions=13)
    with headwise.hf.fast_decode(GPT2LMHeadModel(config)) as fast:
        assert fast.taken == ("lm_head",) and all("Conv1D" in reason for reason in fast.left.values())


def test_a_weight_that_changes_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Linear(7, 5), torch.ones(1, 7)
    with torch.inference_mode(), headwise.hf.fast_decode(layer):
        layer.weight.zero_()
        assert_same_bits(layer(x)[0], layer.bias)
        with counted(monkeypatch) as shapes:
            layer.weight = nn.Parameter(torch.ones(5, 7).T.contiguous().T)  # columns lie together: torch takes it
            torch.testing.assert_close(layer(x)[0], 7 + layer.bias)
        assert shapes == []


def test_without_the_kernel_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.ops.native.library._trouble", "it is not built")
    with pytest.raises(headwise.hf.ModelError, match="it is not built"):
        headwise.hf.fast_decode(llama())


def test_weights_are_moved_to_huge_pages_until_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    module, moved = nn.Sequential(nn.Linear(1024, 3 * 1024), nn.Linear(2048, 2048), nn.ReLU()), []

    def collapse(start: int, end: int) -> bool:
        moved.append((start, end))
        return len(moved) > 1

    monkeypatch.setattr(fast_decode, "collapse", collapse)
    monkeypatch.setattr(huge_pages, "_PART", huge_pages.HUGE)
    x = torch.randn(1, 1024)
    with torch.inference_mode():
        for _ in range(2):  # the first is refused
            with headwise.hf.fast_decode(module) as fast:
                assert len(fast.taken) == 2
                module[0](x)
    parts = huge_pages.huge_parts([layer.weight for layer in module[:2]])
    assert len(parts) > 2 or not hasattr(mmap, "MADV_HUGEPAGE")
    assert moved == [*parts[:1], *parts]
