"""Closed-form repair: planted losses come back, what is fitted holds on text that was not fitted to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.reshape.repair.paired_models import ModuleBatch, Projections, batches_of
from headwise.reshape.repair.reconstruct_modules import reconstruct_modules
from headwise.reshape.repair.ridge import NormalEquations, best
from headwise.reshape.repair.value_solver import ValueSystem, error, solve_values

M = 22


class Model(nn.Module):
    """Two residual layers of grouped-query attention, with biases."""

    def __init__(self, heads: int = 6, kv_heads: int = 3) -> None:
        super().__init__()
        sizes: dict[str, Any] = dict(num_kv_heads=kv_heads, head_dim=5, value_dim=7, bias=True)
        self.layers = nn.ModuleList(headwise.MultiHeadAttention(M, heads, **sizes) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=headwise.causal())
        return x


LAYERS = {f"layers.{n}": Projections(f"layers.{n}.o_proj", f"layers.{n}.v_proj") for n in range(2)}


def batches(count: int = 6) -> list[Tensor]:
    return [torch.randn(3, 37, M) for _ in range(count)]


def spoilt(part: str, seed: int = 0) -> tuple[Model, Model]:
    """A model, and one in which a projection of each layer is another."""
    original = Model()
    changed = copy.deepcopy(original)
    for layer in changed.layers:
        nn.init.normal_(getattr(layer, part).weight, std=0.3)
        nn.init.normal_(getattr(layer, part).bias)
    return original, changed


@pytest.mark.parametrize("inputs", ["original", "own"])
def test_another_output_projection_comes_back(inputs: Any) -> None:
    original, changed = spoilt("o_proj")
    done = reconstruct_modules(changed, original, batches(), LAYERS, inputs=inputs, value_steps=0)
    assert [one.module for one in done] == list(LAYERS)
    for one, layer, before in zip(done, changed.layers, original.layers, strict=True):
        assert one.before > 0.5 and one.after < 1e-6 and not one.values
        assert torch.allclose(layer.o_proj.weight, before.o_proj.weight, atol=1e-2)
        assert torch.allclose(layer.o_proj.bias, before.o_proj.bias, atol=1e-2)
    x = torch.randn(2, 41, M)
    assert torch.allclose(changed(x), original(x), atol=1e-3)


def test_other_values_come_back_given_the_rest() -> None:
    """W_O alone cannot undo values of fewer directions; with the values, too, little is left."""
    original = Model()
    changed = copy.deepcopy(original)
    for layer in changed.layers:
        with torch.no_grad():
            layer.v_proj.weight[1::7] = 0
            layer.v_proj.weight[2::7] = layer.v_proj.weight[3::7]
    text = batches(8)
    other = copy.deepcopy(changed)
    alone = reconstruct_modules(changed, original, text, LAYERS, value_steps=0)
    both = reconstruct_modules(other, original, text, LAYERS, value_steps=20)
    for one, two in zip(alone, both, strict=True):
        assert two.values and two.after < 0.1 * one.after < 0.1 * one.before


def test_merged_heads_are_reconstructed_and_it_holds_on_other_text() -> None:
    original = Model(kv_heads=6)
    changed = Model(kv_heads=3)
    state = original.state_dict()
    for name in list(state):
        if ".k_proj." in name or ".v_proj." in name:
            state[name] = state[name].unflatten(0, (3, 2, -1)).mean(1).flatten(0, 1)
    changed.load_state_dict(state)
    x = torch.randn(2, 41, M)
    before = (changed(x) - original(x)).square().mean()
    done = reconstruct_modules(changed, original, batches(), LAYERS)
    assert all(one.after < 0.8 * one.before for one in done)
    assert (changed(x) - original(x)).square().mean() < 0.8 * before


@pytest.mark.parametrize(("inputs", "value_steps"), [("original", 2), ("own", 2), ("own", 0)])
def test_no_module_behind_the_one_that_is_reconstructed_is_run(inputs: Any, value_steps: int) -> None:
    """A layer a pass: the last layer of both models runs in its own pass, and in the one that finds their order."""
    original, changed = spoilt("o_proj")
    text, runs = batches(7), {"original": 0, "changed": 0}
    for name, model in (("original", original), ("changed", changed)):

        def count(module: nn.Module, args: Any, name: str = name) -> None:
            runs[name] += 1

        model.layers[1].q_proj.register_forward_pre_hook(count)
    reconstruct_modules(changed, original, text, LAYERS, inputs=inputs, value_steps=value_steps)
    assert runs == {"original": 7 + 1, "changed": 7 + 1}


def test_nothing_is_made_worse() -> None:
    """A model that is its own original stays, to the last bit; and so do both models' modes and hooks."""
    original = Model()
    changed = copy.deepcopy(original)
    changed.train()
    done = reconstruct_modules(changed, original, batches(2), LAYERS)
    assert all(one.after <= one.before < 1e-10 for one in done)
    assert all(
        torch.allclose(p, q, atol=1e-5) for p, q in zip(changed.parameters(), original.parameters(), strict=True)
    )
    assert changed.training and changed.layers[0].training
    for model in (original, changed):
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(p.grad is None and p.requires_grad for p in changed.parameters())


@pytest.mark.parametrize("value_steps", [0, 2])
@pytest.mark.parametrize("where", [0, 4])
def test_text_that_is_not_finite_is_refused_and_changes_nothing(where: int, value_steps: int) -> None:
    """Of six batches the fifth is to check by: one token there, or in the first to fit to, spoils every error."""
    original, changed = spoilt("o_proj")
    before = copy.deepcopy(changed.state_dict())
    text = batches()
    text[where][1, 20, 3] = torch.inf
    with pytest.raises(ValueError, match=r"^module 'layers.0': its heads or its outputs on this text hold NaN or inf"):
        reconstruct_modules(changed, original, text, LAYERS, value_steps=value_steps)
    assert all(torch.equal(part, before[name]) for name, part in changed.state_dict().items())


def test_progress_counts_every_batch() -> None:
    original, changed = spoilt("o_proj")
    for value_steps, passes in ((0, 1), (1, 2)):
        steps: list[tuple[int, int]] = []
        reconstruct_modules(
            changed,
            original,
            batches(3),
            LAYERS,
            value_steps=value_steps,
            progress=lambda *t, steps=steps: steps.append(t),
        )
        assert steps == [(n + 1, 3 * passes) for n in range(3 * passes)]


def test_normal_equations_are_those_of_all_rows_at_once() -> None:
    x, y = torch.randn(5, 31, 7, dtype=torch.float64), torch.randn(5, 31, 3, dtype=torch.float64)
    sums = NormalEquations(7, 3)
    for one in range(5):
        sums.add(x[one], y[one])
    flat, wanted = x.flatten(0, 1), y.flatten(0, 1)
    W = torch.linalg.lstsq(flat, wanted).solution
    start = torch.randn(7, 3, dtype=torch.float64)
    assert torch.allclose(sums.solve(0.0, start), W, atol=1e-6)
    assert torch.allclose(sums.solve(1e9, start), start, atol=1e-6)
    assert sums.error(W) == pytest.approx(float((flat @ W - wanted).square().sum() / wanted.square().sum()))


def test_the_ridge_is_chosen_by_text_that_was_not_fitted_to() -> None:
    """So few tokens that the plain fit is far off: a ridge is found; where only noise was fitted to, none is."""
    truth = torch.randn(40, 3, dtype=torch.float64)
    near = truth + 0.3 * torch.randn(40, 3, dtype=torch.float64)

    def sums(rows: int, noise: float) -> NormalEquations:
        x = torch.randn(rows, 40, dtype=torch.float64)
        made = NormalEquations(40, 3)
        made.add(x, x @ truth + noise * torch.randn(rows, 3, dtype=torch.float64))
        return made

    fit, check = sums(45, 1.0), sums(400, 1.0)
    W, ridge = best(fit, check, near)
    assert ridge is not None and ridge > 1e-7
    assert (W - truth).norm() < (fit.solve(0.0, near) - truth).norm()
    assert best(sums(45, 100.0), sums(400, 0.0), truth)[1] is None


class Gated(Model):
    """The heads go through something before they are mixed."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.o_proj = nn.Sequential(nn.Tanh(), layer.o_proj)


def test_what_stands_between_heads_and_their_output_is_seen() -> None:
    layers = {f"layers.{n}": Projections(f"layers.{n}.o_proj.1", f"layers.{n}.v_proj") for n in range(2)}
    original, changed = Gated(), Gated()
    with pytest.raises(ValueError, match=r"'layers.0' takes other than its heads side by side .* value_steps=0"):
        reconstruct_modules(changed, original, batches(2), layers)
    assert all(
        one.after < one.before for one in reconstruct_modules(changed, original, batches(), layers, value_steps=0)
    )


class Columns(nn.Module):
    """A projection that is stored the other way round."""

    def __init__(self, linear: nn.Linear, scale: float = 1.0) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = nn.Parameter(linear.weight.T.contiguous()), linear.bias, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x @ self.weight + self.bias)


def test_a_projection_stored_by_columns_is_solved_too() -> None:
    original, changed = spoilt("o_proj")
    for layer in changed.layers:
        layer.o_proj = Columns(layer.o_proj)
    assert all(one.after < 1e-6 for one in reconstruct_modules(changed, original, batches(), LAYERS, value_steps=0))
    changed.layers[1].o_proj.scale = 2.0
    with pytest.raises(TypeError, match=r"'layers.1.o_proj' \(Columns\) computes other than x W \+ b"):
        reconstruct_modules(changed, original, batches(2), LAYERS)
    changed.layers[1].o_proj.weight.data = changed.layers[1].o_proj.weight.data[None]
    with pytest.raises(TypeError, match=r"Columns has no weight of two axes in floating point; merge adapters"):
        reconstruct_modules(changed, original, batches(2), LAYERS)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"inputs": "both"}, ValueError, 'inputs is "original" or "own"; got \'both\''),
        ({"value_steps": -1}, ValueError, "value_steps is at least 0; got -1"),
        ({"batches": [torch.zeros(1, 2, M)]}, ValueError, "batches are a list of at least two"),
        ({"layers": [LAYERS]}, TypeError, "layers are headwise.reshape.Projections by the name of a module"),
        ({"layers": {**LAYERS, "layers.1": "o_proj"}}, TypeError, "Projections by the name of a module"),
        ({"layers": {"layers.0": Projections("layers.7.o_proj")}}, ValueError, "Model has no module 'layers.7.o_proj'"),
        ({"layers": {"layers.0": Projections("layers")}}, ValueError, "module 'layers' was not run in both models"),
        (
            {"layers": {"attend": Projections("layers.0.o_proj", "layers.0.v_proj")}},
            ValueError,
            "the values of module 'attend' were not seen",
        ),
    ],
)
def test_what_cannot_be_reconstructed_is_refused(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"batches": batches(2), "layers": LAYERS, **changes}
    with pytest.raises(kind, match=text):
        reconstruct_modules(Model(), Model(), **arguments)


def test_the_error_before_is_that_of_the_model_as_it_came() -> None:
    """Of the text to check by, as a share of the squares of what the original gives; from plain calls."""
    original, changed = spoilt("v_proj")
    texts = batches()
    _, check = batches_of(texts)
    left, whole = [0.0, 0.0], [0.0, 0.0]
    with torch.no_grad():
        for x in check:
            for n, (ours, theirs) in enumerate(zip(changed.layers, original.layers, strict=True)):
                wanted = theirs(x, mask=headwise.causal()) - theirs.o_proj.bias
                made = ours(x, mask=headwise.causal()) - ours.o_proj.bias
                target = wanted + theirs.o_proj.bias
                left[n] += float((made + ours.o_proj.bias - target).double().square().sum())
                whole[n] += float(target.double().square().sum())
                x = x + target  # the changed layers read the original's states
    for one, apart, all_of_it in zip(reconstruct_modules(changed, original, texts, LAYERS), left, whole, strict=True):
        assert one.before == pytest.approx(apart / all_of_it, rel=1e-4) and one.after < one.before / 10 and one.values


@pytest.mark.slow
def test_of_the_steps_for_the_values_the_best_is_taken_not_the_last_that_helps() -> None:
    """Fitted to few tokens, the steps go past the best on other text: each number of steps is tried by itself."""
    torch.manual_seed(2)
    mha = headwise.MultiHeadAttention(M, 2, head_dim=5, value_dim=7).double()
    layer = ValueSystem(mha.o_proj.weight.detach().T, None, None, 2)

    def sample(tokens: int) -> ModuleBatch:
        x = torch.randn(1, tokens, M, dtype=torch.float64)
        with torch.no_grad(), headwise.nn.probe(mha) as seen:
            target = mha(x) + 0.3 * torch.randn(1, tokens, M, dtype=torch.float64)
        return ModuleBatch(target, target, x, seen.calls[0])

    fit, check = [sample(101)], [sample(211)]
    start = mha.v_proj.weight.detach().T + torch.randn(M, 14, dtype=torch.float64)
    tried = [solve_values(layer, start, fit, check, steps) for steps in range(1, 13)]
    errors = [error(layer, W, check) for W in tried if W is not None]
    first = error(layer, start, check)
    alone = [first]
    for steps in range(1, 13):  # what the last of so many steps gives, told by fitting and checking on the same text
        W = solve_values(layer, start, fit, fit, steps)
        assert W is not None
        alone.append(error(layer, W, check))
    assert min(alone) < alone[-1] < first, "the last step is worse than the best, and better than the start"
    assert errors[-1] == pytest.approx(min(alone), rel=1e-9) and errors == sorted(errors, reverse=True)


def test_the_heads_of_a_system_are_those_that_the_output_projection_reads() -> None:
    """Whatever stands in the call: a gate of its own, a mask, a scale, a bias of the values."""
    mha = headwise.nn.GatedMultiHeadAttention(M, 4, num_kv_heads=2, head_dim=5, value_dim=7, bias=True)
    mha.inner = headwise.nn.InnerAttention(scale=0.7, softcap=2.0)
    read: list[Tensor] = []
    mha.o_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    x = torch.randn(3, 11, M)
    with torch.no_grad(), headwise.nn.probe(mha) as seen:
        mha(x, mask=headwise.causal())
    layer = ValueSystem(mha.o_proj.weight.detach().T, None, mha.v_proj.bias.detach(), 2)
    got = layer.heads(mha.v_proj.weight.detach().T, seen.calls[0], x)
    torch.testing.assert_close(got, read[0])
    assert not torch.allclose(got, layer.heads(mha.v_proj.weight.detach().T, seen.calls[0], x, bias=False), atol=1e-3)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["changed", "original"])
def test_what_is_no_model_is_named(name: str) -> None:
    models: dict[str, Any] = dict(zip(("changed", "original"), spoilt("o_proj"), strict=True))
    with pytest.raises(TypeError, match=f"^{name} "):
        reconstruct_modules(**(models | {name: "gpt2"}), batches=batches(), layers=LAYERS)
