"""The models of `headwise.testing.constructed` do what their tables say, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.testing.constructed import (
    DECODER,
    ENCODER,
    NAMES,
    Constructed,
    Tables,
    constructed,
    constructed_pair,
    random_model,
    targets,
)
from headwise.testing.pictures import constructed_picture

TABLES = Tables(
    delimiters=(3,), names=(7, 8), needles=(7,), offsets={5: -2, 6: 1}, heads={5: 6}, antecedents={8: 7},
    classes={5: 0, 6: 0, 7: 1, 8: 1}, band=2,
)  # fmt: skip
#         place  0  1  2  3  4  5  6  7
IDS = torch.tensor([1, 7, 5, 6, 8, 3, 7, 2])
BY_HAND = {  # what each query of IDS attends: causal
    "previous-token": {1: [0], 2: [1], 3: [2], 4: [3], 5: [4], 6: [5], 7: [6]},
    "offset-5": {5: [0], 6: [1], 7: [2]},
    "self": {i: [i] for i in range(8)},
    "same token": {**{i: [i] for i in range(8)}, 6: [1, 6]},
    "first-token sink": {i: [0] for i in range(8)},
    "sink at 5": {5: [5], 6: [5], 7: [5]},
    "delimiter": {5: [5], 6: [5], 7: [5]},
    "copying": {1: [1], 2: [1], 3: [1], 4: [1, 4], 5: [1, 4], 6: [1, 4, 6], 7: [1, 4, 6]},
    "broad": {i: list(range(i + 1)) for i in range(8)},
    "local band": {0: [0], **{i: [i - 1, i] for i in range(1, 8)}},
    "idle": {},
    "duplicate-token": {6: [1]},
    "duplicate name": {6: [1]},
    "induction": {6: [2]},
    "retrieval": {6: [2]},
    "subject inhibition": {6: [6], 7: [6]},
    "name mover": {1: [1], 2: [1], 3: [1], 4: [1, 4], 5: [1, 4], 6: [4], 7: [4]},
    "relation by offset": {2: [0]},
    "relation by id": {},
    "coreference": {4: [1]},
    "word class": {3: [2], 4: [1], 6: [1, 4]},
}
BY_HAND_BOTH_WAYS = {
    "next-token": {i: [i + 1] for i in range(7)},
    "offset+6": {0: [6], 1: [7]},
    "[CLS]": {i: [0] for i in range(8)},
    "[SEP]": {i: [7] for i in range(8)},
    "local band": {0: [0, 1], 7: [6, 7], **{i: [i - 1, i, i + 1] for i in range(1, 7)}},
    "duplicate-token": {1: [6], 6: [1]},
    "relation by offset": {2: [0], 3: [4]},
    "relation by id": {2: [3]},
    "coreference": {4: [1, 6]},
    "word class": {1: [4, 6], 2: [3], 3: [2], 4: [1, 6], 6: [1, 4]},
}


def rows(attended: Tensor) -> dict[int, list[int]]:
    return {i: row.nonzero()[:, 0].tolist() for i, row in enumerate(attended) if row.any()}


def test_the_definitions_by_hand() -> None:
    for job, want in BY_HAND.items():
        assert rows(targets(job, IDS, tables=TABLES, causal=True)) == want, job
    for job, want in BY_HAND_BOTH_WAYS.items():
        assert rows(targets(job, IDS, tables=TABLES, causal=False)) == want, job
    memory = torch.tensor([1, 5, 7, 3, 7])
    across = {
        "alignment": {i: [i] for i in range(5)},
        "same token": {0: [0], 1: [2, 4], 2: [1], 5: [3], 6: [2, 4]},
        "first-token sink": {i: [0] for i in range(8)},
    }
    for job, want in across.items():
        assert rows(targets(job, IDS, memory, tables=TABLES, causal=False)) == want, job


def matrices(model: nn.Module, *ids: Tensor) -> Iterator[Tensor]:
    """The float64 attention matrices (H, T, S) of each call."""
    with headwise.nn.probe(model) as seen, torch.no_grad():
        model(*ids)
    for call in seen.calls:
        yield headwise.weights(call.query.double(), call.key.double(), **call.scoring)[0]


def check(job: str, p: Tensor, want: Tensor) -> None:
    """A query's targets hold its weight; without any, one key does: its place of rest."""
    some = want.any(-1)
    assert bool(((p * want).sum(-1)[some] > 0.999).all()), job
    assert bool((p.max(-1).values[~some] > 0.999).all()), job
    if job.startswith(("broad", "local band")):
        torch.testing.assert_close(p, want / want.sum(-1, keepdim=True).double(), rtol=0, atol=1e-6)  # float32 weights


@pytest.mark.parametrize("rest", ["first", "scattered"])
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_every_head_does_its_job(kind: str, rest: str) -> None:
    for seed, length in ((0, 3), (1, 17), (2, 97), (3, 131)):
        model, jobs = constructed(kind=kind, rest=rest, seed=seed, places=131)
        assert sorted(jobs.values()) == sorted(
            job for row in (DECODER if kind == "decoder" else ENCODER) for job in row
        )
        ids = model.sample(length, seed=seed)
        weights = list(matrices(model, ids))
        for (layer, head), job in jobs.items():
            check(f"{job}, {length} tokens", weights[layer][head], model.targets(layer, head, ids[0]))


def test_jobs_find_targets_on_a_sample() -> None:
    """Else the test above would hold of heads that always rest."""
    for kind in ("decoder", "encoder"):
        model, jobs = constructed(kind=kind)
        ids = model.sample(131)
        few = {job for (layer, head), job in jobs.items() if model.targets(layer, head, ids[0]).any(-1).sum() < 3}
        assert few == {"idle"}


def test_a_head_that_rests_rests_where_it_was_told() -> None:
    model, _ = constructed([["idle"]], rest="first")
    [p] = matrices(model, model.sample(31))
    assert p[0, :, 0].min() > 0.999
    model, _ = constructed([["idle"]])
    [p] = matrices(model, model.sample(31))
    at = p[0].argmax(-1)
    assert bool((at[2:] > 0).all()) and bool((at < torch.arange(31))[1:].all()) and len(set(at.tolist())) > 10


def test_the_heads_of_an_encoder_decoder() -> None:
    model, jobs = constructed_pair(places=67)
    ids = model.sample(31)
    read = torch.cat([torch.tensor([[1]]), ids[:, :-2]], 1)  # 30 tokens: the encoder's, behind a start
    weights = list(matrices(model, ids, read))
    assert [len(p) for p in weights] == [3, 2, 4]
    for (layer, head), job in jobs.items():
        queries, memory = ((ids[0], None), (read[0], None), (read[0], ids[0]))[layer]
        check(job, weights[layer][head], targets(job, queries, memory, tables=model.tables, causal=layer == 1))
    assert jobs[2, 0] == "alignment" and weights[2][0].diagonal().min() > 0.999
    assert model(ids, read).shape == (1, 30, 61)


# --- what the heads write ---------------------------------------------------------------------------------------------


def test_copies_are_predicted_by_composition_alone() -> None:
    """The previous-token head's output is what the induction head's keys read: without it nothing is predicted."""
    model, _ = constructed([["previous-token", "broad"], ["induction"]], rest="first")
    for period in (7, 11, 13):
        block = torch.randperm(50, generator=torch.Generator().manual_seed(period))[None, :period] + 5
        ids = torch.cat([torch.tensor([[1]]), block, block, block], 1)
        assert torch.equal(model(ids).argmax(-1)[:, period + 1 : -1], ids[:, period + 2 :])
        without = model.layers[0].register_forward_hook(lambda *_: torch.zeros(()))
        assert torch.equal(model(ids).argmax(-1), ids)
        without.remove()


@pytest.mark.parametrize("subject", [11, 10])
def test_the_circuit_of_names_ends_the_sentence(subject: int) -> None:
    """Then, 10 and 11 went to the store, 11 gave a drink to: 10; and the other way round."""
    model, _ = constructed(NAMES, tables=Tables(names=(10, 11, 12)), vocabulary=41, places=31)
    ids = torch.tensor([[1, 20, 10, 21, 11, 22, 23, 24, subject, 25, 26, 27, 28]])
    logits = model(ids)[0, -1]
    assert logits.argmax() == 21 - subject and logits[21 - subject] - logits[subject] > 3.99
    for layer, p in enumerate(matrices(model, ids)):
        check(NAMES[layer][0], p[0], model.targets(layer, 0, ids[0]))


def test_copying_heads_raise_the_token_that_they_attend_and_no_other_head_a_logit() -> None:
    model, jobs = constructed()
    W_E, W_U = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    copied = torch.ones(61).index_fill(0, torch.tensor([model.tables.opener]), 0).diag()
    for (layer, index), job in jobs.items():
        head = model.layers[layer].head(index)
        logits = W_E @ head.W_V @ head.W_O @ W_U.T
        want = 4 * copied if job in ("induction", "retrieval", "copying") else torch.zeros_like(copied)
        assert torch.equal(logits, want), job
        assert bool(head.W_O.any()), job  # every head writes something


def test_only_the_heads_that_compose_do() -> None:
    """W_O of a lower head meets W_K of a higher one in the previous-token and the induction and retrieval heads."""
    model, jobs = constructed()
    lower = [(job, model.layers[0].head(h)) for (layer, h), job in jobs.items() if layer == 0]
    upper = [(job, model.layers[1].head(h)) for (layer, h), job in jobs.items() if layer == 1]
    pairs = {(a, b) for a, below in lower for b, above in upper if bool((below.W_V @ below.W_O @ above.W_K).any())}
    assert pairs == {("previous-token", "induction"), ("previous-token", "retrieval")}
    assert not any(bool((below.W_O @ above.W_Q).any()) for _, below in lower for _, above in upper)


# --- looked at --------------------------------------------------------------------------------------------------------

SAME = ("previous-token", "offset-3", "self", "first-token sink", "delimiter", "broad", "duplicate-token", "induction")


def test_look_names_the_heads_that_have_a_role() -> None:
    model, jobs = constructed()
    record = headwise.look.at(model, model.sample(97), delimiters=model.tables.delimiters)
    for head in record.heads:
        job = jobs[head.layer, head.head]
        names = [role.name for role in head.roles]
        assert names == [job] if job in SAME else not set(names) & set(SAME), (job, names)


# --- random models ----------------------------------------------------------------------------------------------------


def test_random_models_are_drawn_by_their_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    models = [random_model(seed) for seed in range(12)]
    assert torch.equal(torch.get_rng_state(), state)
    assert len({str(model.facts) for model in models}) == 12
    again = random_model(7)
    ids = torch.tensor([[1, 11, 13, 17]])
    assert torch.equal(again(ids), models[7](ids))
    assert {model.facts["causal"] for model in models} == {model.facts["rotary"] for model in models} == {True, False}
    for model in models:
        assert bool(model(ids).isfinite().all()) and model(ids).shape == (1, 4, model.facts["vocabulary"])


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("layers", "options", "text"),
    [
        ([["reading"]], {}, "a job is one of previous-token, .*; got 'reading'"),
        ([["alignment"]], {"kind": "both"}, "kind is 'decoder' or 'encoder', got 'both'; .* constructed_pair"),
        ([["self"]], {"rest": "last"}, "rest is 'first' or 'scattered', got 'last'"),
        ("self", {}, "layers is a list of jobs for each layer, .*; got 'self'"),
        ([], {}, "layers is a list of jobs for each layer"),
        (["self"], {}, "layers is a list of jobs for each layer"),
        ([["induction"]], {}, "'induction' in layer 0 reads the output of a 'previous-token' head; give a"),
        ([["previous-token", "induction"]], {}, "'induction' in layer 0 reads"),
        ([["copying"], ["self"]], {}, "'copying' in layer 0 writes tokens, .*; put it in the last layer, 1"),
        ([["previous-token"], ["induction"]], {"kind": "encoder"}, "'induction' attends only to earlier tokens"),
        ([["delimiter"]], {"tables": Tables()}, "'delimiter' looks up Tables.delimiters, which is empty; fill it"),
        (
            [["self"]],
            {"tables": Tables(names=(61,))},
            "ids of this model are 0 to 60; the tables contain 61; give a larger",
        ),
        ([["self"]], {"vocabulary": 22}, "tables are drawn from at least 23 ids, got vocabulary=22; give tables="),
        ([["self"]], {"places": 0}, "places is at least 1; got 0"),
    ],
)
def test_what_cannot_be_built_is_refused(layers: object, options: dict[str, object], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        constructed(layers, **options)


@pytest.mark.unchecked
def test_what_cannot_be_a_pair_is_refused() -> None:
    with pytest.raises(
        ValueError, match="one cross-attention; got 1 layers and 2 cross-attentions; give a list of jobs"
    ):
        constructed_pair([["self"]], [["self"]], [["broad"], ["broad"]])
    with pytest.raises(ValueError, match=r"a job is one of alignment, .*; got 'previous-token'"):
        constructed_pair([["self"]], [["self"]], [["previous-token"]])
    with pytest.raises(ValueError, match="'retrieval' attends only to earlier tokens"):
        constructed_pair([["retrieval"]], [["self"]], [["broad"]])


def test_a_text_that_is_too_long_is_refused() -> None:
    model, _ = constructed([["self"]], places=5)
    assert isinstance(model, Constructed)
    with pytest.raises(
        ValueError, match="the text has 6 tokens, but the model has 5 places; build it with more: places="
    ):
        model(torch.zeros(1, 6, dtype=torch.long))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("layers", "options", "text"),
    [
        ([["reading"]], {}, "a job is one of .*; got 'reading'"),
        (
            [["[CLS] sink"]],
            {"summary": False},
            r"'\[CLS\] sink' attends to a token that the model does not have; set",
        ),
        ([["register sink"]], {}, "'register sink' attends to a token that the model does not have; .* registers="),
        ([["self"]], {"registers": 2, "summary": False}, r"registers follow \[CLS\]; set summary=True"),
    ],
)
def test_pictures_of_jobs_that_cannot_be_built_are_refused(
    layers: list[list[str]], options: dict[str, int], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        constructed_picture(layers, (3, 5), **options)
