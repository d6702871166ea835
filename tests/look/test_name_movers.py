"""Name movers with their sign: attention, and copying through W_V and W_O, against dense matrices in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from draw import drawn
from hf_models import BY_NAME
from test_circuits import Small
from torch import Tensor, nn

import headwise
import headwise.hf  # lets look see transformers models
from headwise import look
from headwise.look import Passage
from headwise.look.roles.catalog import SENTENCES
from headwise.look.weights.copying import Copying
from headwise.nn import probe
from headwise.testing.constructed import NAMES, constructed

SIGNED = {"name mover": 1, "negative name mover": -1, "name suppressor": -1}
ALONE = "name mover by attention"


def gifts(length: int, count: int, seed: int) -> list[Passage]:
    """Passages of few tokens, some of them linked as names from some queries."""
    dice = random.Random(seed)
    made = []
    for _ in range(count):
        ids = [1, *(dice.randrange(10, 26) for _ in range(length - 1))]
        rows: dict[str, list[list[int]]] = {"name mover": [], "other name": []}
        for i in range(length):
            chosen = dice.sample(range(length), 5) if dice.random() < 0.7 else []
            rows["name mover"].append(sorted(chosen[:3]))
            rows["other name"].append(sorted(chosen[3:]) if i % 2 else [])
        made.append(Passage(ids, links=rows))
    return made


def names_of(passages: Sequence[Passage]) -> list[int]:
    """The tokens that a passage links as a name."""
    return sorted({one.ids[j] for one in passages for rows in one.links.values() for keys in rows for j in keys})


def centred(norm: nn.Module, x: Tensor) -> Tensor:
    """The linear part of a norm."""
    if isinstance(norm, nn.Identity):
        return x
    weight = norm.weight.double()  # type: ignore[operator,union-attr]
    return (x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x) * weight


def written(model: Any, layer: int, value: Tensor) -> Tensor:
    """What each of the 4 heads of a layer of `Small` adds to the residual stream for each key alone, (H, S, M)."""
    W = model.layers[layer].o_proj.weight.double().T.unflatten(0, (4, -1))
    return torch.stack([centred(model.behind[layer], value[h // 2] @ W[h]) for h in range(4)])


def signs_of(x: Tensor, unembedding: Tensor, ids: Sequence[int], names: Sequence[int], among: Any) -> list[list[int]]:
    """By head and key: 1 where no token's logit is above that of the name itself, -1 where none is below."""
    logits = x.detach() @ unembedding.detach().double().T
    out = []
    for head in logits:
        row = []
        for j, token in enumerate(ids):
            others = [float(head[j, one]) for one in among if one != token]
            own = float(head[j, token])
            row.append(0 if token not in names else 1 if own > max(others) else -1 if own < min(others) else 0)
        out.append(row)
    return out


def wanted(p: Tensor, signs: list[list[int]], passage: Passage, name: str, h: int) -> tuple[float, int, float, float]:
    """Sums of one head over the queries of a passage: total, count, uniform, and the mean on the other name."""
    total = uniform = against = 0.0
    count = others = 0
    order = ("other name", "name mover") if name == "name suppressor" else ("name mover", "other name")
    for i in range(len(passage.ids)):
        keys, other = ([j for j in passage.links[of][i] if 0 < j <= i] for of in order)
        total += sum(float(p[h, i, j]) for j in keys if signs[h][j] == SIGNED[name])
        uniform += len(keys) / (i + 1)
        against += sum(float(p[h, i, j]) for j in other if signs[h][j] == SIGNED[name])
        count, others = count + bool(keys), others + bool(other)
    return total, count, uniform, against / max(others, 1)


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True], ids=["plain", "a norm behind"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_the_score_is_attention_to_names_whose_values_have_the_sign(norm: Any, behind: bool) -> None:
    found = dict.fromkeys(SIGNED, 0)
    for seed in drawn(range(8), most=3):
        passages = gifts(21, 1, seed)
        model, names = Small(norm, behind=behind), names_of(passages)
        with torch.no_grad():
            for part in model.parameters():
                part.add_(0.3 * torch.randn(part.shape, generator=torch.Generator().manual_seed(seed + part.numel())))
        seen = look.at(model, passages[0].ids, repeats=None, readings={SENTENCES: passages})
        with torch.no_grad(), probe(model) as calls:
            model(torch.tensor([passages[0].ids]))
            for layer, call in enumerate(calls.calls):
                p = headwise.weights(call.query, call.key, **call.scoring)[0].double()
                x = centred(model.final, written(model, layer, call.value[0].double()))
                signs = signs_of(x, model.unembed.weight, passages[0].ids, names, {*passages[0].ids})
                for h in range(4):
                    scores = seen.head(layer, h).scores
                    assert ALONE not in scores
                    for name, sign in SIGNED.items():
                        total, count, uniform, against = wanted(p, signs, passages[0], name, h)
                        assert scores[name].count == count
                        assert scores[name].value == pytest.approx(total / count, abs=2e-5)
                        assert scores[name].null == pytest.approx(max(uniform / count, against), abs=2e-5)
                        found[name] += total > 0
                        shown = {(one.query, one.key) for one in scores[name].evidence}
                        of = "other name" if name == "name suppressor" else "name mover"
                        assert all(signs[h][j] == sign and j in passages[0].links[of][i] for i, j in shown)
    assert all(found.values())


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["Llama GQA", "GPT-2"])
def test_models_of_transformers_have_both_signs(name: str) -> None:
    """Values of key-value groups, through the rows of the projection that belong to the query head."""
    passages = gifts(19, 3, 5)
    model, names = BY_NAME[name].build().eval(), names_of(passages)
    llama = name == "Llama GQA"
    final = model.model.norm if llama else model.transformer.ln_f
    seen = look.at(model, passages[0].ids, repeats=None, readings={SENTENCES: passages})
    among = {i for one in passages for i in one.ids}
    sums = {(layer, h, role): [0.0, 0] for layer in range(2) for h in range(4) for role in SIGNED}
    for passage in passages:
        with torch.no_grad(), probe(model) as calls:
            model(torch.tensor([passage.ids]))
        for layer, call in enumerate(calls.calls):
            part = model.model.layers[layer].self_attn.o_proj if llama else model.transformer.h[layer].attn.c_proj
            W = (part.weight.T if llama else part.weight).double().unflatten(0, (4, -1)).detach()
            value = call.value[0].double()
            x = torch.stack([value[h * len(value) // 4] @ W[h] for h in range(4)])
            fold = x - x.mean(-1, keepdim=True) if not llama else x
            signs = signs_of(fold * final.weight.detach().double(), model.lm_head.weight, passage.ids, names, among)
            p = headwise.weights(call.query, call.key, **call.scoring)[0].double()
            for h in range(4):
                for role in SIGNED:
                    total, count, *_ = wanted(p, signs, passage, role, h)
                    sums[layer, h, role][0] += total
                    sums[layer, h, role][1] += count
    for (layer, h, role), (total, count) in sums.items():
        score = seen.head(layer, h).scores[role]
        assert (score.count, score.value) == (count, pytest.approx(total / count, abs=2e-5))
    assert sum(total > 0 for total, _ in sums.values()) > 4


def test_a_model_without_logits_has_attention_alone_and_says_so() -> None:
    passages = gifts(19, 2, 3)
    model = BY_NAME["BERT"].build().eval()  # a norm behind each sum
    for head in look.at(model, passages[0].ids, repeats=None, readings={SENTENCES: passages}).heads:
        assert ALONE in head.scores and not {*SIGNED} & {*head.scores}
        assert head.scores[ALONE].value > 0
    few = [replace(one, ids=[10 + i % 9 for i in range(19)]) for one in passages]  # the first of few is so by chance
    for head in look.at(Small(), few[0].ids, repeats=None, readings={SENTENCES: few}).heads:
        assert ALONE in head.scores and not {*SIGNED} & {*head.scores}


def put(model: Small, how: str) -> Small:
    """A model, part of which is not linear: what its heads do to the logits is then not defined."""
    if how == "before W_O":
        model.layers[1].o_proj = nn.Sequential(nn.Tanh(), model.layers[1].o_proj)
    elif how == "behind W_O":
        model.behind[1] = nn.Tanh()
    else:
        model.final = nn.Tanh()
    return model


@pytest.mark.parametrize(
    ("how", "signed"), [("before W_O", {0, 2}), ("behind W_O", {0, 2}), ("before the unembedding", set())]
)
def test_a_layer_that_does_not_add_to_the_logits_has_attention_alone(how: str, signed: set[int]) -> None:
    passages = gifts(19, 3, 5)
    for head in look.at(put(Small(), how), passages[0].ids, repeats=None, readings={SENTENCES: passages}).heads:
        assert ({*SIGNED} <= {*head.scores}, ALONE in head.scores) == (head.layer in signed, head.layer not in signed)


@pytest.mark.parametrize(("names", "others"), [(3, 509), (3, 510), (3, 990), (500, 499), (512, 487), (600, 300)])
def test_names_are_compared_with_at_most_512_tokens_evenly_chosen(names: int, others: int) -> None:
    class Wide(Small):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.embed, self.unembed = nn.Embedding(1000, 24), nn.Linear(24, 1000)

    called, rest = [*range(0, 2 * names, 2)], [i for i in range(1000) if i % 2 or i >= 2 * names][:others]
    if names > 500:
        called, rest = [*range(names)], [*range(names, names + others)]
    made = Copying.of(Wide(), [1, 5, 7, 11], called, {*rest, *called})
    assert made is not None
    ids = made.ids.tolist()
    chosen = [rest.index(i) for i in ids if i in rest]
    assert ids == sorted({*ids}) and [i for i, one in zip(ids, made.names.tolist(), strict=True) if one] == called
    assert len(chosen) == min(others, max(512 - names, 0))
    if chosen:
        gaps = [b - a for a, b in zip(chosen, [*chosen[1:], others], strict=True)]
        assert chosen[0] == 0 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("sign", "swapped", "name"),
    [(1, False, "name mover"), (-1, False, "negative name mover"), (-1, True, "name suppressor"), (1, True, "")],
)
def test_a_name_mover_that_writes_the_opposite_has_another_role(sign: int, swapped: bool, name: str) -> None:
    model, jobs = constructed(NAMES)
    [place] = [place for place, job in jobs.items() if job == "name mover"]
    passages = []
    for seed in range(40):
        [ids] = model.sample(31, seed=seed).tolist()
        names = [j for j, one in enumerate(ids[:-1]) if one in model.tables.names]
        single = [j for j in names if ids.count(ids[j]) == 1]
        if len(single) == 1:
            rows = [[] for _ in ids[:-1]]
            pair = ("other name", "name mover") if swapped else ("name mover", "other name")
            links = {pair[0]: [*rows, single], pair[1]: [*rows, [j for j in names if j not in single]]}
            passages.append(Passage(ids, links=links))
    with torch.no_grad():
        projection: Any = model.layers[place[0]].o_proj
        projection.weight.mul_(sign)
    seen = look.at(model, passages[0].ids, repeats=None, readings={SENTENCES: passages})
    for role in SIGNED:
        assert [(one.layer, one.head) for one in seen.with_role(role)] == ([place] if role == name else [])
