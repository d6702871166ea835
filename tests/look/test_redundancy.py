"""Heads that do the same: distances against whole matrices, clusters against the closest pair first."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hf_models import BY_NAME
from torch import Tensor, nn

import headwise
from headwise.look import Redundancy, SimilarHead, redundancy
from headwise.look.interventions.similarity import linked, output_distances, pattern_distances
from headwise.nn import AttentionCall, MultiHeadAttention, probe
from headwise.ops.statistics.weights import weights

TEXT = [1, 7, 23, 11, 5, 7, 31, 2, 47, 23, 11]


def calls_of(name: str) -> list[AttentionCall]:
    model = BY_NAME[name].build()
    with torch.no_grad(), probe(model) as seen:
        model(torch.tensor([TEXT]))
    return seen.calls


@pytest.mark.parametrize("name", ["Llama GQA", "gpt-oss sinks", "BERT"])
def test_patterns_against_whole_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(name)
    P = torch.cat([weights(call.query, call.key, **call.scoring)[0] for call in calls]).double().detach()
    if name == "gpt-oss sinks":
        P = torch.cat([P, 1 - P.sum(-1, keepdim=True)], -1)
    P = 0.999 * P + 0.001 / P.shape[-1]
    for rows, picked in ((128, list(range(11))), (3, [0, 3, 7])):
        for numbers in (1 << 23, 200):  # blocks of a few rows give the same
            monkeypatch.setattr(sys.modules["headwise.look.interventions.similarity"], "NUMBERS", numbers)
            got = pattern_distances(calls, rows)
            for a, b in itertools.product(range(8), repeat=2):
                p, q = P[a, picked], P[b, picked]
                m = (p + q) / 2
                js = (p * (p / m).log2() + q * (q / m).log2()).sum(-1).mean() / 2
                assert got[a, b] == pytest.approx(float(js), abs=2e-6), (a, b)


def test_rows_that_may_attend_nothing_are_not_compared() -> None:
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    mask = headwise.window(3, 0) & headwise.keep(torch.tensor([0, 1, 1, 1, 1]).bool().view(1, 1, 5, 1))
    full, cut = AttentionCall("", 0, q, k), AttentionCall("", 1, q, k, mask=mask)
    some = pattern_distances([cut, full])
    there = [AttentionCall("", 0, q[:, :, 1:], k, mask=rule) for rule in (headwise.window(3, 0), None)]
    one = pattern_distances(there)
    np.testing.assert_allclose(some[:2], one[:2], atol=1e-6)


def test_outputs_against_gram_matrices() -> None:
    """The unbiased estimate of HSIC as it is written, with every T x T matrix made; heads of two widths."""
    n, generator = 13, torch.Generator().manual_seed(3)
    outs = [torch.randn(3, n, 5, generator=generator), torch.randn(2, n, 7, generator=generator)]
    outs[1][0, :, :5] = 2 * outs[0][1] @ torch.linalg.qr(torch.randn(5, 5, generator=generator))[0] + 3
    outs[1][0, :, 5:] = 0
    heads = [out.double() for part in outs for out in part]

    def hsic(x: Tensor, y: Tensor) -> float:
        K, L = (g - g.diagonal().diag() for g in (x @ x.mT, y @ y.mT))
        whole = K.sum() * L.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (K @ L).sum()
        return float((K @ L).trace() + whole) / (n * (n - 3))

    got = output_distances(outs)
    for a, b in itertools.product(range(5), repeat=2):
        x, y = heads[a], heads[b]
        expected = 1 - min(max(hsic(x, y) / (hsic(x, x) * hsic(y, y)) ** 0.5, 0), 1)
        assert got[a, b] == pytest.approx(expected, abs=1e-9)
    assert got[1, 3] == pytest.approx(0, abs=1e-9), "turned, scaled and shifted"
    apart = output_distances([torch.randn(40, 17, 16, generator=generator)])
    assert apart[~np.eye(40, dtype=bool)].mean() > 0.95, "nothing in common, on 17 tokens of 16 numbers"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_outputs_of_few_tokens_are_not_compared(length: int) -> None:
    """The estimate divides by n - 2 and n - 3."""
    result = redundancy(BY_NAME["Llama GQA"].build(), {"input_ids": torch.tensor([TEXT[:length]])})
    assert {(head.output, head.output_of) for head in result.heads} == {(None, None)} and result.outputs == ()
    assert all(head.pattern is not None for head in result.heads) and str(result)


def closest_first(distances: Any, threshold: float) -> list[list[int]]:
    groups = [[n] for n in range(len(distances))]
    while len(groups) > 1:
        gap, a, b = min(
            (float(np.mean([distances[i, j] for i in x for j in y])), n, m)
            for (n, x), (m, y) in itertools.combinations(enumerate(groups), 2)
        )
        if gap > threshold:
            break
        groups[a] += groups.pop(b)
    return sorted(sorted(group) for group in groups)


def test_clusters_are_those_of_the_closest_pair_first() -> None:
    generator = np.random.default_rng(5)
    for size, threshold in itertools.product((1, 2, 3, 7, 17), (0.0, 0.2, 0.3, 0.4, 0.5, 2.0)):
        points = generator.random((size, 2))
        distances = np.sqrt(((points[:, None] - points) ** 2).sum(-1))
        assert sorted(linked(distances, threshold)) == closest_first(distances, threshold), (size, threshold)


class Copies(nn.Module):
    """Head 2 of the second layer is a copy of head 0 of the first; its head 1 looks alike and gives something else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(53, 24)
        self.layers = nn.ModuleList(MultiHeadAttention(24, 3) for _ in range(2))
        with torch.no_grad():
            for part in self.layers:
                part.o_proj.weight.zero_()
                part.q_proj.weight.mul_(30)
            one, two = ({n: p.unflatten(0, (3, 8)) for n, p in x.state_dict().items()} for x in self.layers)
            for name in ("q_proj.weight", "k_proj.weight"):
                two[name][1:] = one[name][:1]
            two["v_proj.weight"][2] = one["v_proj.weight"][0]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask=headwise.causal())
        return x


def test_copies_are_known_and_clustered() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        result = redundancy(Copies(), torch.randint(0, 53, (1, 37)), name="copies")
    assert result.patterns == (((0, 0), (1, 1), (1, 2)),) and result.outputs == (((0, 0), (1, 2)),)
    by = {(twin.layer, twin.head): twin for twin in result.heads}
    assert by[0, 0].output_of == (1, 2) and by[1, 2].output_of == (0, 0)
    assert by[1, 2].output == pytest.approx(0, abs=1e-9)
    assert by[1, 1].pattern == pytest.approx(0, abs=1e-6) and by[1, 1].output > 0.15
    assert (result.tokens, result.rows, len(result.heads)) == (37, 37, 6)
    assert json.loads(result.to_json())["model"] == "copies"


def test_cross_attention_is_a_kind_of_its_own() -> None:
    done: list[tuple[int, int]] = []
    result = redundancy(BY_NAME["T5"].build(), TEXT, threshold=1.0, progress=lambda *a: done.append(a))
    assert [len(group) for group in result.patterns] == [8, 8, 8] and done == [(1, 3), (2, 3), (3, 3)]
    kind = {layer: n for n, group in enumerate(result.patterns) for layer, _ in group}
    for twin in result.heads:
        assert kind[twin.pattern_of[0]] == kind[twin.layer] == kind[twin.output_of[0]]


def test_a_head_alone_has_no_twin() -> None:
    class Alone(nn.Module):
        """One head."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attend = nn.Embedding(53, 4), MultiHeadAttention(4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.attend(self.embed(ids))

    [twin] = redundancy(Alone(), TEXT).heads
    assert twin.pattern is twin.pattern_of is twin.output is twin.output_of is None


@pytest.mark.unchecked
def test_what_does_not_fit_is_refused() -> None:
    model = BY_NAME["Llama GQA"].build()
    for text, ids, options in (
        (r"on one text of at least 4 tokens; got 3; give a longer text", [1, 2, 3], {}),
        (r"on one text of at least 4 tokens; got 2 texts, of 11, 11 tokens; give one of them", [TEXT, TEXT], {}),
        ("threshold is a distance from 0 to 1; got 2", TEXT, {"threshold": 2}),
        ("rows", TEXT, {"rows": 0}),
    ):
        with pytest.raises(ValueError, match=text):
            redundancy(model, ids, **options)


def test_it_prints_as_tables_of_clusters_and_pairs() -> None:
    heads = (
        SimilarHead(0, 1, 0.25, (2, 3), 0.75, (1, 0)),
        SimilarHead(1, 0, None, None, 0.75, (0, 1)),
        SimilarHead(2, 3, 0.25, (0, 1), None, None),
    )
    found = Redundancy("m", 17, 13, 0.3, heads, patterns=(((0, 1), (2, 3)),), outputs=())
    printed = [" ".join(line.replace("│", " ").split()) for line in str(found).splitlines()]
    assert "patterns 2 0.1 2.3" in printed, "a cluster"
    assert printed.count("patterns 0.1 2.3 0.250") == 1, "a pair is shown once"
    assert "outputs 0.1 1.0 0.750" in printed
    assert "take a larger threshold" in " ".join(str(replace(found, patterns=())).split())
