"""Activation patching against hooks on the output projections, written by hand, one run after another."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hf_models import BY_NAME
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.look import LogitDifference, Patching, patch
from headwise.look.files import write
from headwise.testing.constructed import constructed

CLEAN = [1, 7, 23, 11, 5, 7, 31, 2, 47, 23, 11]
CORRUPTED = [1, 7, 23, 13, 5, 7, 31, 3, 47, 23, 13]
NEAR = 5e-6
"""How far two float32 computations of a difference of these logits may lie apart."""

PROJECTIONS = {"GPT-2": "transformer.h.{}.attn.c_proj", "Llama GQA": "model.layers.{}.self_attn.o_proj"}


@functools.cache
def built(name: str) -> PreTrainedModel:
    return BY_NAME[name].build().eval()


def projections(name: str) -> list[nn.Module]:
    model = built(name)
    return [model.get_submodule(PROJECTIONS[name].format(n)) for n in range(model.config.num_hidden_layers)]


@contextmanager
def inputs_of(modules: list[nn.Module], change: Any) -> Iterator[None]:
    """Hand each module's input to `change`, which may return another."""
    hooks = [
        module.register_forward_pre_hook(lambda _, args, n=n: (change(n, args[0]),))  # type: ignore[misc]
        for n, module in enumerate(modules)
    ]
    yield
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def by_hand(name: str, layer: int, head: int, position: int | None, measure: Any) -> float:
    """The effect, from three plain runs of the eager model."""
    model, modules = built(name), projections(name)
    heads = model.config.num_attention_heads
    kept: dict[int, Tensor] = {}
    with inputs_of(modules, lambda n, x: kept.setdefault(n, x.clone())):
        clean = measure(model(torch.tensor([CLEAN])).logits[0])
    corrupted = measure(model(torch.tensor([CORRUPTED])).logits[0])

    def change(n: int, x: Tensor) -> Tensor:
        if n != layer:
            return x
        size = x.shape[-1] // heads
        x, columns = x.clone(), slice(head * size, (head + 1) * size)
        rows = slice(None) if position is None else slice(position, position + 1)
        x[:, rows, columns] = kept[n][:, rows, columns]
        return x

    with inputs_of(modules, change):
        patched = measure(model(torch.tensor([CORRUPTED])).logits[0])
    return float((patched - corrupted) / (clean - corrupted))


def near(found: Patching, effect: float) -> Any:
    """An effect is a quotient of two differences, and both have the errors of the logits."""
    return pytest.approx(effect, abs=NEAR * (1 + abs(effect)) / abs(found.clean - found.corrupted))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_effect_of_each_head_is_that_of_plain_runs(name: str) -> None:
    found = patch(built(name), CLEAN, torch.tensor([CORRUPTED]), LogitDifference(17, 29))
    places = {(one.layer, one.head) for one in found.heads}
    assert len(places) == len(found.heads) == len(projections(name)) * built(name).config.num_attention_heads
    for one in found.heads:
        expected = by_hand(name, one.layer, one.head, None, lambda logits: logits[-1, 17] - logits[-1, 29])
        assert one.position is None and one.effect == near(found, expected)
    assert max(abs(one.effect) for one in found.heads) > 0.01


def test_a_metric_of_the_other_sign_has_the_same_effects() -> None:
    """Whether clean is above corrupted or below, 1 is as clean and 0 as corrupted."""
    one, other = (patch(built("GPT-2"), CLEAN, CORRUPTED, LogitDifference(*ids)) for ids in ((17, 29), (29, 17)))
    assert (one.clean, one.corrupted) == pytest.approx((-other.clean, -other.corrupted), abs=1e-6)
    for head, mirrored in zip(one.heads, other.heads, strict=True):
        assert head.effect == near(one, mirrored.effect)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_positions_are_patched_alone_and_a_metric_is_any_function(name: str) -> None:
    def confidence(output: Any, ids: Tensor) -> Tensor:
        assert ids.shape == (len(output.logits), len(CLEAN))
        return output.logits.float().log_softmax(-1)[:, 3:7, 17].sum(-1)

    found = patch(built(name), CLEAN, CORRUPTED, confidence, heads=[(1, 2), (0, 1)], positions=True)
    assert found.metric == "confidence" and found.by_position
    assert [(one.layer, one.head) for one in found.heads] == [(1, 2)] * len(CLEAN) + [(0, 1)] * len(CLEAN)
    for one in found.heads:
        expected = by_hand(
            name, one.layer, one.head, one.position, lambda logits: logits.log_softmax(-1)[3:7, 17].sum()
        )
        assert one.effect == near(found, expected)
    late = [one.effect for one in found.heads if one.position in (7, 8, 9, 10)]
    assert late == pytest.approx([0.0] * len(late), abs=1e-6), "causal: later positions change nothing before them"


def test_the_induction_circuit_carries_the_answer() -> None:
    """What followed last time differs between the texts: the heads of induction restore it, and no other head."""
    model, jobs = constructed([["self", "previous-token", "broad"], ["induction", "duplicate-token"]])
    read = model.sample(17)[0].tolist()
    clean, corrupted = read + read[1:5], [*read, *read[1:5]]
    corrupted[5] = next(token for token in range(1, 999) if token not in read)
    metric = LogitDifference(clean[5], corrupted[5])
    found = patch(model, clean, corrupted, metric)
    assert found.clean > 0 > found.corrupted
    effects = {jobs[one.layer, one.head]: one.effect for one in found.heads}
    assert effects["induction"] == pytest.approx(1, abs=0.05)
    assert all(abs(effects[job]) < 0.1 for job in effects if job not in ("induction", "previous-token")), effects
    where = patch(model, clean, corrupted, metric, positions=True).best(1)[0]
    assert (jobs[where.layer, where.head], where.position) == ("induction", len(clean) - 1)


@pytest.mark.parametrize("positions", [False, True])
def test_it_prints_as_a_table_and_writes_as_a_heatmap(positions: bool, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    found = patch(built("Llama GQA"), CLEAN, CORRUPTED, LogitDifference(17, 29), positions=positions, name="a$b")
    assert Patching(**{**found.to_dict(), "heads": found.heads}) == found
    best = found.best(1)[0]
    assert f"{best.effect:+.3f}" in str(found) and "logit of '17' minus '29'" in str(found).replace("\n", " ")
    size = write(found, tmp_path / "patch.svg")
    drawn = (tmp_path / "patch.svg").read_text()
    assert len(drawn.encode()) == size and "a$b" in drawn and ("11 | 13" in drawn) == positions


def test_a_row_of_the_table_has_the_tokens_of_both_texts() -> None:
    """At positions 3, 7 and 10 the texts differ; each token stands in the column of its own text."""
    found = patch(built("Llama GQA"), CLEAN, CORRUPTED, LogitDifference(17, 29), heads=[(0, 1)], positions=True)
    columns = {str(column.header): list(column.cells) for column in found.table(most=99).columns}
    assert sorted(columns["position"], key=int) == [str(i) for i in range(len(CLEAN))]
    for name, text in (("clean", CLEAN), ("corrupted", CORRUPTED)):
        shown = dict(zip(map(int, columns["position"]), map(str, columns[name]), strict=True))
        assert [shown[i] for i in range(len(text))] == [repr(str(token)) for token in text]


PAIR = LogitDifference(1, 2)


@pytest.mark.parametrize(
    ("error", "text", "changed"),
    [
        (ValueError, "as many tokens; got 11 and 10", {"corrupted": CORRUPTED[1:]}),
        (ValueError, "on both texts, so there is no difference", {"corrupted": CLEAN}),
        (ValueError, "heads of layer 1 are 0 to", {"heads": [(1, 99)]}),
        (ValueError, "logits of ids 1 and 9999 needs", {"metric": LogitDifference(1, 9999)}),
        (ValueError, "position 11 is not among the 11", {"metric": LogitDifference(1, 2, 11)}),
        (ValueError, r"a float for each row of the batch, \(1,\)", {"metric": lambda output, ids: output.logits}),
    ],
)
def test_what_is_wrong_is_said(error: type[Exception], text: str, changed: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        patch(built("Llama GQA"), **{"clean": CLEAN, "corrupted": CORRUPTED, "metric": PAIR} | changed)
