"""Every detector on heads that do one job by construction: its own scores 0.99, and no other claims it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

import headwise
from headwise import look
from headwise.look import Look, Passage, Repeats, Vocabulary
from headwise.look.inputs.needles import needles
from headwise.testing.constructed import (
    DECODER,
    ENCODER,
    NAMES,
    Constructed,
    constructed,
    constructed_pair,
    random_model,
    targets,
)

LENGTH = 89
CALLED = {
    "sink at 3": "sink elsewhere",
    "[CLS]": "first-token sink",
    "[SEP]": "special tokens",
    "relation by offset": "nsubj to head",
    "relation by id": "obj to head",
    "word class": "same word class",
    "alignment": "alignment, next",
    "same token": "alignment",
}
"""What a job is called as a role, where the names differ."""

NO_ROLE = {"idle", "copying", "duplicate name", "subject inhibition"}
"""Jobs without a role: to see them takes values and logits, or an intervention."""

IMPLIED = {"induction": {"retrieval"}}  # what follows a token is found again, in a needle as elsewhere

LINKS = {"relation by offset", "relation by id", "coreference", "word class", "name mover"}


def annotated(model: Constructed, jobs: Mapping[tuple[int, int], str], seed: int) -> Passage:
    """A text with the links of the jobs that an annotation tells."""
    [ids] = model.sample(LENGTH, seed=seed)
    links = {}
    for job in {*jobs.values()} & LINKS:
        keys = targets(job, ids, tables=model.tables, causal=model.mask is not None)
        keys.fill_diagonal_(False)
        keys &= ~torch.isin(ids, torch.tensor([model.tables.opener, model.tables.closer]))  # no word is linked to these
        links[CALLED.get(job, job)] = [row.nonzero()[:, 0].tolist() for row in keys]
    if "coreference" in links:
        links["mentions"] = [
            [j for j in range(LENGTH) if j != i] if row else [] for i, row in enumerate(links["coreference"])
        ]
        links["nearest noun"] = [[max(i - 1, 0)] if row else [] for i, row in enumerate(links["coreference"])]
    if "name mover" in links:
        links["name mover"] = [row if i == LENGTH - 1 else [] for i, row in enumerate(links["name mover"])]
    return Passage(ids.tolist(), links=links)


def read(model: Constructed, jobs: Mapping[tuple[int, int], str], *, sentences: int = 12) -> Look:
    tables = model.tables
    extra: dict[str, list[Passage]] = {"sentences": [annotated(model, jobs, seed) for seed in range(sentences)]}
    if tables.needles:
        [hay] = model.sample(53)
        hay = hay[~torch.isin(hay, torch.tensor(tables.needles))]
        extra["needles"] = needles(hay.tolist(), tables.needles, length=len(tables.needles), around=53)
    return look.over(
        model,
        [model.sample(LENGTH, seed=seed)[0] for seed in range(5)],
        words=Vocabulary(frozenset(tables.delimiters), special=frozenset({tables.opener, tables.closer})),
        readings=extra,
    )


@pytest.mark.parametrize(("layers", "kind"), [(DECODER, "decoder"), (ENCODER, "encoder")], ids=["decoder", "encoder"])
def test_every_detector_finds_its_head_and_no_other(layers: object, kind: str) -> None:
    model, jobs = constructed(layers, kind=kind)  # type: ignore[arg-type]
    seen = read(model, jobs)
    for head in seen.heads:
        job = jobs[head.layer, head.head]
        roles = {score.name: score for score in head.roles}
        name = CALLED.get(job, job)
        if job in NO_ROLE:
            assert not roles, job
        else:
            assert {*roles} - IMPLIED.get(name, set()) == {name}, (job, head.roles)
            assert roles[name].value >= 0.99, (job, roles[name])
            assert all(0 < one.weight <= 1 for one in roles[name].evidence)
            assert roles[name].evidence or name == "broad"
            assert roles[name].mass is None or f"{roles[name].mass:.2f}" in str(roles[name])


def test_name_movers_are_found() -> None:
    model, jobs = constructed(NAMES)
    seen = read(model, jobs, sentences=40)
    [mover] = seen.with_role("name mover")
    assert jobs[mover.layer, mover.head] == "name mover" and mover.scores["name mover"].value > 0.9


def test_alignment_is_found_in_cross_attention_alone() -> None:
    model, jobs = constructed_pair()
    record = look.at(model, [1, *range(3, 60)], delimiters=[])  # no token twice: then a token has one place
    for head in record.heads:
        name = CALLED.get(jobs[head.layer, head.head], jobs[head.layer, head.head])
        assert [score.name for score in head.roles] == [name], head
        assert head.roles[0].value >= 0.99
    assert [head.part for head in record.heads] == ["encoder"] * 3 + ["decoder"] * 2 + ["cross"] * 4


def test_a_sink_is_no_offset_in_a_text_hardly_longer_than_it() -> None:
    """Of five tokens one query has a key four before it: the first token, which a sink attends from everywhere."""
    model, _ = constructed([["first-token sink"]])
    seen = look.at(model, [1, 3, 4, 5, 6], delimiters=[], full_maps=False, map_size=1, repeats=None)
    scores = seen.heads[0].scores
    assert scores["offset-4"].value > 0.9 and scores["offset-4"].count == 1
    assert not [score.name for score in seen.heads[0].roles if score.name.startswith("offset")]


@pytest.mark.parametrize("after", [0, 3])
def test_a_mark_that_hardly_a_query_sees_makes_no_role(after: int) -> None:
    """Of a text that ends with a full stop one query decides; heads of random models would pass."""
    model, _ = constructed([["delimiter"]])
    mark = model.tables.delimiters[0]
    ids = [1, *(i for i in range(3, 19) if i not in model.tables.delimiters)]
    ids.insert(len(ids) - after, mark)
    [head] = look.at(model, ids, delimiters=[mark], full_maps=False, map_size=1, repeats=None).heads
    assert head.scores["delimiter"].value > 0.9 and head.scores["delimiter"].count == after + 1
    assert head.scores["delimiter"].plays is (after == 3)


@pytest.mark.slow
def test_random_models_play_hardly_a_role() -> None:
    """Of the roles of all heads of 200 models at most 1 % are false: a broad head is one, random or not."""
    played = heads = 0
    for seed in range(200):  # all of them: a rate among 13 of them is past its limit on one day in six
        model = random_model(seed)
        ids = torch.randint(3, 50, (41,), generator=torch.Generator().manual_seed(seed))
        seen = look.at(model, ids, full_maps=False, map_size=1, repeats=Repeats(sequences=4, length=50))
        heads += len(seen.heads)
        played += sum(any(score.name != "broad" for score in head.roles) for head in seen.heads)
    assert heads > 5 * 200 and played <= 0.01 * heads


def test_needles() -> None:
    passages = needles(range(9), range(5, 40), count=4, length=3, around=20)
    distances = set()
    for passage in passages:
        needle = passage.ids[-3:]
        assert len(passage.ids) == 26 and not {*needle} & {*range(9)}
        linked = {i: keys for i, keys in enumerate(passage.links["retrieval"]) if keys}
        assert [passage.ids[j] for i in sorted(linked) for j in linked[i]] == needle[1:] and sorted(linked) == [23, 24]
        distances.add(23 - linked[23][0])
    assert len(distances) == 4
    with pytest.raises(ValueError, match="a needle has 7 tokens that the text does not contain, and there are 1 to"):
        needles([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="needles stand in a text, and this one has no token; give a longer text"):
        needles([], range(40))


def test_a_sink_of_a_head_is_one_choice_more_of_a_broad_one() -> None:
    """The entropy is that of the whole softmax, so it is held against as many choices as that has."""
    torch.manual_seed(7)
    sinks = torch.tensor([-1.0, 0.5, 2.0])
    mha = headwise.MultiHeadAttention(12, 3, inner=headwise.nn.InnerAttention(sinks=sinks))
    embed, ids = torch.nn.Embedding(97, 12), torch.arange(3, 43)
    seen = look.at(CausalModel(embed, mha), ids.tolist())
    with torch.no_grad():
        q, k = (part(embed(ids)).view(40, 3, 4).transpose(0, 1) for part in (mha.q_proj, mha.k_proj))
        scores = (q @ k.mT / 2).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
        choices = torch.cat([scores, sinks[:, None, None].expand(3, 40, 1)], -1).softmax(-1)
    for head in range(3):
        rows = [torch.distributions.Categorical(choices[head, i]).entropy() / math.log(i + 2) for i in range(7, 40)]
        assert seen.head(0, head).value("broad") == pytest.approx(float(torch.stack(rows).mean()), abs=1e-4)


class CausalModel(torch.nn.Module):
    def __init__(self, embed: torch.nn.Module, mha: torch.nn.Module) -> None:
        super().__init__()
        self.embed, self.mha, self.out = embed, mha, torch.nn.Linear(12, 97)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.mha(self.embed(ids), mask=headwise.causal()))
