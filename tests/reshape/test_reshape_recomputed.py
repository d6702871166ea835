"""Numbers and tensors of `headwise.reshape` computed a second way: brute force over all choices, and loops over tokens.

The table `CHECKS` lists what is compared, for MHA, GQA and MQA, values of another size than keys, biases, and texts of
several lengths.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reshape_models import Made, decoder
from torch import Tensor, nn

import headwise
from headwise.nn import GatedMultiHeadAttention, InnerAttention, OutputGate
from headwise.reshape import (
    Budget,
    DistillConfig,
    Projections,
    by_call,
    by_twins,
    distill,
    plan_prune,
    plan_regroup,
    prune_module,
    reconstruct_modules,
)
from headwise.reshape.repair.linear_matrix import Matrix
from headwise.reshape.repair.ridge import RIDGES

# --- pruning ----------------------------------------------------------------------------------------------------------


def drawn_scores(seed: int, layers: int, H: int) -> dict[tuple[int, int], float]:
    draw = random.Random(seed)
    return {(layer, head): draw.uniform(-1, 1) for layer in range(layers) for head in range(H)}


def every_choice(H: int, K: int) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """By (query heads, key-value heads): all sets of heads of which equally many read each key-value head left."""
    choices: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for size in range(1, H + 1):
        for heads in itertools.combinations(range(H), size):
            read = [h // (H // K) for h in heads]
            if len({read.count(kv) for kv in read}) == 1:
                choices.setdefault((size, len({*read})), []).append(heads)
    return choices


def check_choice(seed: int) -> None:
    """A fraction, named heads with scores, and a budget, each by brute force over all sets of heads."""
    for H, K in ((5, 5), (6, 3), (6, 2), (4, 1)):
        source, scores, choices = decoder(H, K), drawn_scores(seed, 2, H), every_choice(H, K)
        source.tensors["model.mask"] = SimpleNamespace(dtype=torch.bool, shape=(13,))  # one byte a number
        best = {
            count: [max(some, key=lambda heads: sum(scores[n, h] for h in heads)) for n in range(2)]
            for count, some in choices.items()
        }
        value = {count: sum(scores[n, h] for n in range(2) for h in best[count][n]) for count in best}
        for fraction in (0.3, 0.5, 0.71):
            far = {count: (abs(count[0] - fraction * H), -count[0]) for count in best}
            nearest = [count for count in best if far[count] == min(far.values())]
            count = max(nearest, key=lambda count: value[count])
            if count[0] < H:
                plan = plan_prune(source, keep_fraction=fraction, scores=scores)
                assert [some.query for some in plan.kept.values()] == best[count], (H, K, fraction)
        named = {0: {1}, 1: {0, H - 1}}
        fits = {}
        for count, some in choices.items():
            rows = [[heads for heads in some if not named[n] & {*heads}] for n in range(2)]
            if all(rows):
                chosen = [max(rows[n], key=lambda heads: sum(scores[n, h] for h in heads)) for n in range(2)]
                fits[count] = (count[0], sum(scores[n, h] for n in range(2) for h in chosen[n])), chosen
        if fits:
            plan = plan_prune(source, heads={n: sorted(some) for n, some in named.items()}, scores=scores)
            assert [some.query for some in plan.kept.values()] == max(fits.values())[1], (H, K)
        # float32: embeddings, q and o of each layer by query heads, k and v and their cache by key-value heads
        fixed, of_head = 13 + 4 * 11 * 26, 4 * 2 * 2 * 5 * 26
        bytes_of = {count: fixed + of_head * sum(count) + 4 * 2 * 2 * count[1] * 5 * 97 for count in best}
        for limit in sorted({*bytes_of.values()})[1::3]:
            allowed = [count for count in best if bytes_of[count] <= limit]
            count = max(allowed, key=lambda count: (count[0], value[count]))
            plan = plan_prune(source, budget=Budget(limit / 1e6, context=97), scores=scores)
            assert [some.query for some in plan.kept.values()] == best[count], (H, K, limit)


@pytest.mark.parametrize(("H", "fraction"), [(4, 0.875), (5, 0.9)])  # 2 * (1 - 0.9) * 5 is below 1 in floats
def test_a_fraction_that_is_half_a_head_from_all_is_refused_too(H: int, fraction: float) -> None:
    """Of equally near numbers the larger is taken, and that of all heads changes nothing."""
    with pytest.raises(ValueError, match="no number of them that loads is nearer to it than all"):
        plan_prune(decoder(H, H), keep_fraction=fraction, scores=drawn_scores(1, 2, H))


class Filled(Made):
    """A checkpoint of random numbers that lies nowhere."""

    def __init__(self, made: Made) -> None:
        super().__init__(made.config, {name: one.shape for name, one in made.tensors.items()})
        self.numbers = {name: torch.randn(one.shape) for name, one in made.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.numbers[name].clone()


def check_tensors(seed: int) -> None:
    """What a plan writes: rows and columns of the heads that stay, copied head by head; and its facts, by counting."""
    source = Filled(decoder(6, 3, vocab_size=11))
    gone = {0: [1, 3, 4], 1: [0, 2, 5]}
    for zero in (False, True):
        plan = plan_prune(source, heads=gone, zero=zero)
        made = {one.name: one.make() for one in plan.tensors()}
        size = 0
        for name, before in source.numbers.items():
            expected = before
            if "layers" in name:
                kept = [h for h in range(6) if h not in gone[int(name.split(".")[2])]]
                if zero and "o_proj" in name:
                    expected = before.clone()
                    for h in set(range(6)) - set(kept):
                        expected[:, h * 5 : h * 5 + 5] = 0
                elif not zero and name.split(".")[-2] in ("q_proj", "o_proj"):
                    by_head = (before if "q_proj" in name else before.T).unflatten(0, (6, 5))
                    expected = torch.cat([by_head[h] for h in kept])
                    expected = expected if "q_proj" in name else expected.T
            assert torch.equal(made[name], expected), name
            size += expected.numel() * 4
        facts = plan.facts()
        assert facts["weight_bytes"] == [sum(x.numel() * 4 for x in source.numbers.values()), size]
        heads = [6, 6 if zero else 3]
        assert facts["counts"] == {"num_attention_heads": heads, "num_key_value_heads": [3, 3]}
        assert facts["gone"] == {str(n): some for n, some in gone.items()}
        assert plan.gates() == [[int(h not in some) for h in range(6)] for some in gone.values()]
        assert facts["notes"][0] == f"6 of 12 heads are {'zeroed' if zero else 'removed'}."


def check_regroup(seed: int) -> None:
    """Grouped queries that come to share fewer keys: means of the groups' rows, and facts by counting."""
    source = Filled(decoder(8, 4, D=6))
    groups = [[0, 3], [1, 2]]
    plan = plan_regroup(source, 2, method="mean", groups={"0": groups, "1": groups})  # type: ignore[arg-type]
    made, heads = {one.name: one.make() for one in plan.tensors()}, [0, 1, 6, 7, 2, 3, 4, 5]
    for name, before in source.numbers.items():
        rows = before.unflatten(0, (-1, 6)) if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else before
        if "k_proj" in name or "v_proj" in name:
            rows = torch.stack([(rows[a] + rows[b]) / 2 for a, b in groups]).flatten(0, 1)
        elif "q_proj" in name:
            rows = rows[heads].flatten(0, 1)
        elif "o_proj" in name:
            rows = rows.unflatten(1, (8, 6))[:, heads].flatten(1)
        torch.testing.assert_close(made[name], rows)
    facts = plan.facts()
    assert facts["counts"] == {"num_attention_heads": [8, 8], "num_key_value_heads": [4, 2]}
    assert facts["weight_bytes"] == [4 * sum(x.numel() for x in some.values()) for some in (source.numbers, made)]
    assert plan.heads_plan() == {"layers": {str(n): {"keep": heads, "kv_heads": 2} for n in range(2)}}


def check_module(seed: int) -> None:
    """A pruned module is the whole one without the heads' terms, and keeps what belongs to a parameter."""
    for (H, K, gone), by_number in itertools.product(
        ((5, 5, [3]), (6, 3, [0, 3, 5]), (6, 2, [3, 4, 5])), (False, True)
    ):
        mha = GatedMultiHeadAttention(
            29, H, num_kv_heads=K, head_dim=7, value_dim=3, bias=True, inner=InnerAttention(sinks=torch.randn(H)),
            gate=lambda M, H, V, by=by_number: OutputGate(M, H, V if by else None, bias=True),
        )  # fmt: skip
        mha.k_proj.weight.requires_grad_(False)
        x, kept = torch.randn(2, 11, 29), [h for h in range(H) if h not in gone]
        switch = torch.tensor([float(h in kept) for h in range(H)])
        expected = mha(x, mask=headwise.causal(), gate=switch)
        before = {name: part.detach().clone() for name, part in mha.named_parameters()}
        pruned = prune_module(copy.deepcopy(mha), gone)
        torch.testing.assert_close(pruned(x, mask=headwise.causal()), expected)
        read = sorted({h // (H // K) for h in kept})
        assert (pruned.num_heads, pruned.num_kv_heads) == (len(kept), len(read))
        assert not pruned.k_proj.weight.requires_grad and pruned.q_proj.weight.requires_grad
        for name, heads, count in (
            ("q_proj", kept, H),
            ("k_proj", read, K),
            ("v_proj", read, K),
            ("gate.proj", kept, H),
        ):
            part = pruned.get_submodule(name)
            for leaf in ("weight", "bias"):
                blocks = before[f"{name}.{leaf}"].chunk(count)
                assert torch.equal(getattr(part, leaf), torch.cat([blocks[h] for h in heads])), name
            assert (part.out_features, part.in_features) == tuple(part.weight.shape)
        assert torch.equal(pruned.inner.sinks, before["inner.sinks"][kept])  # type: ignore[union-attr, arg-type]


def check_scores(seed: int) -> None:
    """Twins one by one in the order of their distances; and rows that belong to layers in their order of calls."""
    draw = random.Random(seed)
    places = [(layer, head) for layer in range(3) for head in range(5)]
    twins = [(place, draw.choice([draw.random(), None]), draw.choice(places)) for place in places]
    gone: list[tuple[int, int]] = []
    expected = {}
    for place, distance, nearest in sorted(twins, key=lambda one: (1.0 if one[1] is None else one[1], one[0])):
        expected[place] = (1.0 if distance is None else distance) + (1.0 if nearest in gone else 0.0)
        if nearest not in gone:
            gone.append(place)
    assert by_twins(twins) == [[expected[layer, head] for head in range(5)] for layer in range(3)]
    source, values = decoder(5, 5, layers=3), [[draw.random() for _ in range(5)] for _ in range(3)]
    plan = plan_prune(source, keep_fraction=0.6, scores=by_call(values))
    worst = {str(n): sorted(sorted(range(5), key=lambda h: row[h])[:2]) for n, row in enumerate(values)}
    assert plan.gone == worst


# --- recovery ---------------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Two residual layers of grouped-query attention; the name of one begins as that of the other."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = dict(num_kv_heads=3, head_dim=5, value_dim=7, bias=True)
        self.one, self.one_more = (headwise.MultiHeadAttention(17, 6, **sizes) for _ in range(2))

    @property
    def layers(self) -> list[Any]:
        return [self.one, self.one_more]

    def forward(self, x: Tensor) -> Tensor:
        for one in self.layers:
            x = x + one(x, mask=headwise.causal())
        return x


NAMES = ("one", "one_more")


def heads_in(model: Stack, n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """The input of a layer's output projection for the layer's input, and what the layer gives out."""
    kept: list[Tensor] = []
    hook = model.layers[n].o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    out = model.layers[n](x, mask=headwise.causal())
    hook.remove()
    return kept[0].detach(), out.detach()


@torch.no_grad()
def check_reconstruction(seed: int) -> None:
    """W_O of each layer as ridge regression of all tokens, and errors on the held-out batch, without sums."""
    for inputs in ("original", "own"):
        original, changed = Stack(), Stack()
        batches = [torch.randn(2, length, 17) for length in (23, 11, 31, 7, 13, 29)]
        before = copy.deepcopy(changed)
        where = {name: Projections(f"{name}.o_proj") for name in NAMES}
        done = reconstruct_modules(changed, original, batches, where, inputs=inputs, value_steps=0)  # type: ignore[arg-type]
        read, wanted = batches, batches  # the inputs of a layer of the changed model, and of the original
        for n, one in enumerate(done):
            targets = [heads_in(original, n, some)[1] for some in wanted]
            X = [
                torch.cat([heads, torch.ones(*heads.shape[:2], 1)], 2).flatten(0, 1).double()
                for heads, _ in (heads_in(before, n, some) for some in read)
            ]
            Y = [some.flatten(0, 1).double() for some in targets]
            start = torch.cat([before.layers[n].o_proj.weight.T, before.layers[n].o_proj.bias[None]]).double()

            def missed(W: Tensor, X: Any = X, Y: Any = Y) -> float:
                return float((X[4] @ W - Y[4]).square().sum() / Y[4].square().sum())

            fits = {
                ridge: nearest_map(torch.cat([*X[:4], X[5]]), torch.cat([*Y[:4], Y[5]]), start, ridge)
                for ridge in RIDGES
            }
            best = min(fits, key=lambda ridge: missed(fits[ridge]))
            W = nearest_map(torch.cat(X), torch.cat(Y), start, best)
            assert one.ridge == best and not one.values
            assert (one.before, one.after) == pytest.approx((missed(start), missed(W)), rel=1e-3)
            projection = changed.layers[n].o_proj
            torch.testing.assert_close(projection.weight.double(), W[:-1].T, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(projection.bias.double(), W[-1], atol=1e-3, rtol=1e-3)
            own = [heads_in(changed, n, some)[1] for some in read]
            wanted = [some + out for some, out in zip(wanted, targets, strict=True)]
            read = wanted if inputs == "original" else [some + out for some, out in zip(read, own, strict=True)]


def nearest_map(x: Tensor, y: Tensor, start: Tensor, ridge: float) -> Tensor:
    """The ridge regression as plain least squares: more rows, which ask for `start` as hard as they may."""
    weight = (ridge * x.square().sum(0)).sqrt().diag()
    return torch.linalg.lstsq(torch.cat([x, weight]), torch.cat([y, weight @ start])).solution


@torch.no_grad()
def check_values(seed: int) -> None:
    """With values solved too, the errors that are told are those of the modules as they were and as they are left."""
    original = Stack()
    changed = copy.deepcopy(original)
    for one in changed.layers:
        one.v_proj.weight[1::7] = 0
    before, batches = copy.deepcopy(changed), [torch.randn(3, length, 17) for length in (43, 31, 37, 29)]
    where = {name: Projections(f"{name}.o_proj", f"{name}.v_proj") for name in NAMES}
    x = batches[-1]
    for n, done in enumerate(reconstruct_modules(changed, original, batches, where, value_steps=5)):
        target, first, last = (heads_in(model, n, x)[1] for model in (original, before, changed))
        whole = float(target.square().sum())
        wanted = [float((some - target).square().sum()) / whole for some in (first, last)]
        assert (done.module, done.values) == (NAMES[n], True)
        assert (done.before, done.after) == pytest.approx(wanted, rel=1e-3)
        x = x + target


def check_matrix(seed: int) -> None:
    """A projection by rows and one by columns are the same map."""
    linear = nn.Linear(7, 5)

    class ByColumns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(linear.weight.detach().T.contiguous()), linear.bias

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    for module in (linear, ByColumns()):
        matrix, x = Matrix.of(module, "one"), torch.randn(3, 7)
        assert matrix.b is not None
        torch.testing.assert_close(x @ matrix.W + matrix.b, linear(x))


class Speaker(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.out = nn.Embedding(13, 7), nn.Linear(7, 13)
        nn.init.normal_(self.embed.weight, std=6.0)  # gradients are longer than 1, to which they are cut

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids))


def check_distill(seed: int) -> None:
    """The whole run as a plain loop: windows, rates, losses, updates and the losses on held-out text."""
    text = torch.randint(13, (101,), generator=torch.Generator().manual_seed(seed))
    held = torch.randint(13, (3, 11), generator=torch.Generator().manual_seed(seed + 1))
    config = DistillConfig(7, rows=3, length=9, lr=0.05, warmup=3, weight_decay=0.2, text=0.3, seed=seed)
    student, plain, teacher = Speaker(1), Speaker(1), Speaker(2)
    curve = distill(student, teacher, text, config, held=held, first=4, every=3, call=lambda model, ids: model(ids))
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    adam = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}])

    def losses(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Divergences (B, T) and losses of the text (B, T - 1)."""
        said, known = plain(ids).log_softmax(-1), teacher(ids).log_softmax(-1).detach()
        return (known.exp() * (known - said)).sum(-1), -said[:, :-1].gather(2, ids[:, 1:, None])[..., 0]

    steps, measured, lengths = [], [], list[float]()
    for step in range(7):
        if step % 3 == 0:
            measured.append([step, *(float(some.detach().mean()) for some in losses(held))])
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(101 - 8 + 1, (3,), generator=draw).tolist()
        ids = torch.tensor([[4, *text[start : start + 8].tolist()] for start in starts])
        far, own = losses(ids)
        loss = sum(far[n].sum() / 9 + 0.3 * own[n].sum() / 8 for n in range(3)) / 3
        adam.zero_grad()
        loss.backward()
        lengths.append(float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0)))
        share = (step + 1) / 3 if step < 3 else 0.01 + 0.99 * (1 + math.cos(math.pi * (step - 3) / 4)) / 2
        for group in adam.param_groups:
            group["lr"] = 0.05 * share
        adam.step()
        steps.append(float(loss.detach()))
    measured.append([7, *(float(some.detach().mean()) for some in losses(held))])
    assert max(lengths) > 1.5 and curve.steps == pytest.approx(steps, abs=1e-5)
    assert np.allclose(curve.held, measured, atol=1e-4)
    for a, b in zip(student.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


CHECKS: dict[str, Callable[[int], None]] = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}


@pytest.mark.parametrize("name", CHECKS)
def test_numbers_are_those_of_a_second_way(name: str) -> None:
    torch.manual_seed(17)
    CHECKS[name](17)
