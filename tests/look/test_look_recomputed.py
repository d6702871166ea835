"""Every number of `headwise.look` computed a second way: by a NumPy model of the same weights, with loops.

The table `CHECKS` lists the public functions. Each check runs on models whose layers are of different families (MHA,
GQA with sinks in a window, MQA with a softcap and a scale), as decoders and as encoders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from draw import slow_except
from look_definitions import gathered, of_text
from look_matrices import Call
from plain_looks import CLOSE, LOOSE, compositions, divergence, hsic, joined, lengths, means, near, over_keys, pooled
from plain_reader import VOCABULARY, M, Mixed, Plain, drawn_text, log_softmax, rank_correlation, rms

from headwise import look
from headwise.look import LogitDifference, Passage, Vocabulary
from headwise.look.curve import Point


def check_at(model: Mixed, plain: Plain, seed: int) -> None:
    ids = drawn_text(seed, 41)
    found, run = look.at(model, ids, repeats=None), plain.run(ids)
    assert (found.num_layers, found.num_heads, found.length, len(found.heads)) == (3, 6, 41, len(plain.heads))
    assert found.kind == ("encoder" if model.ahead else "decoder")
    for n, (layer, h) in enumerate(plain.heads):
        head, call, expected = found.heads[n], run.calls[layer], means([run], layer, h)
        assert (head.layer, head.head, head.module, head.queries, head.keys) == (layer, h, f"layers.{layer}", 41, 41)
        for name in ("entropy", "largest", "offsets"):
            assert near(getattr(head, name), expected[name]), name
        assert near(head.distance, expected["distance"], LOOSE)
        assert near(head.ahead, expected["ahead"] if model.ahead else [])
        p = over_keys(call.p[h])
        assert near(head.map, pooled(p, 32))
        assert near(found.maps[n].weights(), p, 0.004)  # half a step of a byte
        by_moved = over_keys(call.p[h] * lengths(call)[h])
        assert near(found.moved[n].weights(), by_moved, 0.004)
        assert near(head.first_moved, by_moved[1:, 0].mean())
    for layer, kept in enumerate(found.neurons):
        call = run.calls[layer]
        codes = np.frombuffer(kept.weights, np.uint8).reshape(call.p.shape)
        assert near(np.sqrt(call.p) * 255, codes, 0.51)
        assert near(kept.scale, 0.61 if layer == 2 else call.q.shape[-1] ** -0.5)
        assert (kept.softcap, kept.sunk, kept.biased, kept.gated) == (
            7.3 if layer == 2 else None, layer == 1, False, False,
        )  # fmt: skip
        shared = len(call.q) // call.groups
        for vectors, exact in ((kept.query, call.q), (kept.key, call.k[::shared]), (kept.value, call.v[::shared])):
            half_step = np.abs(exact).max(-1, keepdims=True) / 127 * 0.51 + CLOSE
            assert vectors is not None and (np.abs(vectors.array() - exact) <= half_step).all()


def check_roles(model: Mixed, plain: Plain, seed: int) -> None:
    """Scores and chance levels of the roles of text, by the definitions of docs/roles.md."""
    ids = drawn_text(seed + 1, 37)
    words = Vocabulary(frozenset(ids[5:8]), frozenset(ids[5:9]), frozenset({ids[0]}))
    found = look.over(model, [ids], words=words, repeats=None)
    part = "encoder" if model.ahead else "decoder"
    calls = [Call(part, c.p[None], [ids], [ids], [Passage(ids)]) for c in plain.run(ids).calls]
    for (layer, h), sums in gathered([calls], lambda call: of_text(call, words)).items():
        for name, expected in sums.items():
            score = found.head(layer, h).scores.get(name)
            apart = layer == 0 and model.apart  # rows of such a head have other numbers of choices than those of others
            if (name == "broad" and (layer == 1 or apart)) or (name == "sink elsewhere" and apart):
                continue
            if name == "far offset" and expected.value < 0.5:
                continue  # of distances that as many queries have, any may be told
            assert (score is not None) == bool(expected.count), name
            if score is not None:
                assert score.count == expected.count and near(score.value, expected.value), name
                assert expected.null is None or near(score.null, expected.null), name


class Paired(Mixed):
    """The model, as one that is given what a tokenizer makes of two sentences."""

    def forward(self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(input_ids)


def check_pairs(model: Mixed, plain: Plain, seed: int) -> None:
    """Heads between two sentences: the first and the last token are no words."""
    ids = np.random.default_rng(seed).permutation(VOCABULARY)[:23].tolist()
    paired = Paired(seed, ahead=model.ahead).eval()
    given = {"input_ids": torch.tensor([ids]), "token_type_ids": torch.tensor([[0] * 11 + [1] * 12])}
    found, calls = look.at(paired, given, repeats=None), plain.run(ids).calls
    sides = {"first to second": (range(1, 11), range(11, 22)), "second to first": (range(11, 22), range(1, 11))}
    for (layer, h), (name, (rows, keys)) in itertools.product(plain.heads, sides.items()):
        score, call = found.head(layer, h).scores[name], calls[layer]
        assert score.count == len(rows) and near(score.value, call.p[h][np.ix_(rows, keys)].sum() / len(rows))
        even = call.seen / call.seen.sum(-1, keepdims=True)
        assert near(score.null, even[np.ix_(rows, keys)].sum() / len(rows))


def check_over(model: Mixed, plain: Plain, seed: int) -> None:
    """Texts of several lengths, more of them than there are groups of the bootstrap."""
    texts = [drawn_text(seed + n, (5, 7, 11)[n % 3]) for n in range(65)] + [drawn_text(seed, 41)]
    found, runs = look.over(model, texts, repeats=None), [plain.run(ids) for ids in texts]
    assert (found.texts, found.length) == (66, sum(map(len, texts)))
    groups = [[run for n, run in enumerate(runs) if n % 64 == g] for g in range(64)]
    samples = np.random.default_rng(0).multinomial(64, [1 / 64] * 64, size=400)
    for layer, h in [(0, 3), (1, 5), (2, 1)]:
        head, expected = found.head(layer, h), means(runs, layer, h)
        for name in ("entropy", "largest", "offsets"):
            assert near(getattr(head, name), expected[name]), name
        assert near(head.distance, expected["distance"], LOOSE)
        assert (head.queries, head.keys) == (41, 41)
        maps = [pooled(over_keys(run.calls[layer].p[h]), 11) for run in runs if len(run.logits) == 11]
        assert near(head.map, np.mean(maps, 0)), "of the size that most rows of all texts have"
        score = head.scores["first-token sink"]
        rows = [[(r.calls[layer].p[h][1:, 0], r.calls[layer].seen[1:, 0]) for r in some] for some in groups]
        total = np.array([sum(p.sum() for p, _ in some) for some in rows])
        count = np.array([sum(int(s.sum()) for _, s in some) for some in rows])
        values = sorted((samples @ total) / (samples @ count))
        assert score.count == count.sum() and near(score.value, total.sum() / count.sum())
        ends = [values[9] * (1 - f) + values[10] * f if first else values[389] * (1 - f) + values[390] * f
                for first, f in ((True, 0.025 * 399 - 9), (False, 0.975 * 399 - 389))]  # fmt: skip
        assert near((score.low, score.high), ends)


def check_importance(model: Mixed, plain: Plain, seed: int) -> None:
    texts = [drawn_text(seed, 13), drawn_text(seed + 1, 7), drawn_text(seed + 2, 5)]
    by = ("gradient", "zero", "mean", "contribution")
    found = look.importance(model, texts, by=by)
    runs = [plain.run(ids) for ids in texts]
    before = [run.loss(ids) for run, ids in zip(runs, texts, strict=True)]
    assert (found.texts, found.tokens) == (3, 25) and near(found.loss, np.mean(before), LOOSE)
    step, slopes = 1e-4, {}
    for layer, h in plain.heads:
        head = next(one for one in found.heads if (one.layer, one.head) == (layer, h))
        outs = [run.calls[layer].out[h] for run in runs]
        mean = np.concatenate(outs).mean(0)
        for name, instead in (("zero", 0.0), ("mean", mean)):
            after = [plain.instead(ids, {(layer, h): instead}).loss(ids) for ids in texts]
            assert near(getattr(head, name), np.mean(np.subtract(after, before)), LOOSE), name
        slopes[layer, h] = []
        for ids, out in zip(texts, outs, strict=True):
            up, down = (plain.instead(ids, {(layer, h): out * (1 + s)}).loss(ids) for s in (step, -step))
            slopes[layer, h].append(abs(up - down) / (2 * step))
        K, H = runs[0].calls[layer].groups, len(runs[0].calls[layer].q)
        assert head.group == h // (H // K)
        mine = [other for other in range(H) if other // (H // K) == h // (H // K)]
        written = np.concatenate([sum(run.calls[layer].written[other] for other in mine) for run in runs])
        assert near(head.contribution, np.linalg.norm(written, axis=1).mean(), LOOSE)
    for by_texts, wanted in (((0, 1, 2), None), ((0, 2), 0), ((1,), 1)):
        raw = {place: np.mean([slopes[place][n] for n in by_texts]) for place in plain.heads}
        size = {layer: math.sqrt(sum(raw[at] ** 2 for at in plain.heads if at[0] == layer)) for layer in range(3)}
        shares = [raw[at] / size[at[0]] for at in plain.heads]
        if wanted is None:
            assert near([one.gradient_raw for one in found.heads], [raw[at] for at in plain.heads], LOOSE)
            assert near([one.gradient for one in found.heads], shares, 10 * LOOSE)
        else:
            slopes[-1, wanted] = shares
    assert near(found.stability, rank_correlation(slopes[-1, 0], slopes[-1, 1]))
    for one in found.agreements:
        columns = [[getattr(head, name) for head in found.heads] for name in (one.first, one.second)]
        assert near(one.rho, rank_correlation(*columns))
    assert [(a.first, a.second) for a in found.agreements] == [*itertools.combinations(by, 2)]


def check_ablate(model: Mixed, plain: Plain, seed: int) -> None:
    texts, heads = [drawn_text(seed, 11), drawn_text(seed + 1, 5)], [(1, 4), (0, 2), (2, 0)]
    runs = [plain.run(ids) for ids in texts]
    for by in ("zero", "mean"):
        found = look.ablate(model, texts, heads, by=by)
        means = {
            (layer, h): np.concatenate([run.calls[layer].out[h] for run in runs]).mean(0) if by == "mean" else 0.0
            for layer, h in heads
        }
        losses = [np.mean([plain.instead(ids, {at: means[at]}).loss(ids) for ids in texts]) for at in heads]
        assert near([one.loss for one in found.heads], losses, LOOSE)
        cut = [plain.instead(ids, means) for ids in texts]
        assert near(found.before, np.mean([run.loss(ids) for run, ids in zip(runs, texts, strict=True)]), LOOSE)
        assert near(found.after, np.mean([run.loss(ids) for run, ids in zip(cut, texts, strict=True)]), LOOSE)
        kls = {}
        for text, position in ((t, i) for t in range(2) for i in range(len(texts[t]))):
            b, a = (log_softmax(some[text].logits[position]) for some in (runs, cut))
            kls[text, position] = float((np.exp(b) * (b - a)).sum())
        assert near(found.kl, np.mean([*kls.values()]), LOOSE)
        assert [(one.text, one.position) for one in found.places] == sorted(kls, key=lambda at: -kls[at])[:5]
        for one in found.places:
            b, a = (np.exp(log_softmax(some[one.text].logits[one.position])) for some in (runs, cut))
            assert near(one.kl, kls[one.text, one.position], LOOSE)
            assert one.token == str(texts[one.text][one.position])
            assert [x.id for x in one.tokens] == np.argsort(-np.abs(a - b), kind="stable")[:3].tolist()
            assert near([(x.before, x.after) for x in one.tokens], [(b[x.id], a[x.id]) for x in one.tokens])


def check_patch(model: Mixed, plain: Plain, seed: int) -> None:
    clean, corrupted = drawn_text(seed, 7), drawn_text(seed, 7)
    corrupted[2] = (corrupted[2] + 5) % VOCABULARY
    healthy, broken = plain.run(clean), plain.run(corrupted)
    for position in (-1, 4):
        gap = [run.logits[position, 3] - run.logits[position, 8] for run in (healthy, broken)]
        found = look.patch(model, clean, corrupted, LogitDifference(3, 8, position))
        assert near((found.clean, found.corrupted), gap, LOOSE)
        assert [(one.layer, one.head) for one in found.heads] == plain.heads
        ordered = sorted((abs(one.effect) for one in found.heads), reverse=True)
        assert [abs(one.effect) for one in found.best(5)] == ordered[:5]
        for one in found.heads:
            at = one.layer, one.head
            run = plain.instead(corrupted, {at: healthy.calls[at[0]].out[at[1]]})
            moved = run.logits[position, 3] - run.logits[position, 8]
            assert near(one.effect * (gap[0] - gap[1]), moved - gap[1], LOOSE)
    some = [(1, 3), (2, 2)]
    for one in look.patch(model, clean, corrupted, LogitDifference(3, 8), heads=some, positions=True).heads:
        out = broken.calls[one.layer].out[one.head].copy()
        out[one.position] = healthy.calls[one.layer].out[one.head][one.position]
        run = plain.instead(corrupted, {(one.layer, one.head): out})
        gap = [x.logits[-1, 3] - x.logits[-1, 8] for x in (healthy, broken, run)]
        assert near(one.effect * (gap[0] - gap[1]), gap[2] - gap[1], LOOSE)


def check_redundancy(model: Mixed, plain: Plain, seed: int) -> None:
    ids = drawn_text(seed, 17)
    calls = plain.run(ids).calls
    for rows, threshold in ((128, 0.4), (5, 0.9)):
        found = look.redundancy(model, ids, threshold=threshold, rows=rows)
        assert (found.tokens, found.rows) == (17, min(rows, 17))
        chosen = range(17) if rows > 17 else [n * 17 // 5 for n in range(5)]
        smooth, grams = {}, {}
        for layer, h in plain.heads:
            p = np.concatenate([calls[layer].p[h], 1 - calls[layer].p[h].sum(-1, keepdims=True).clip(0, 1)], -1)
            smooth[layer, h] = 0.999 * p + 0.001 / 18  # a sink column counts as a key, in every head
            grams[layer, h] = calls[layer].out[h] @ calls[layer].out[h].T
        far, apart = (np.zeros((len(plain.heads),) * 2) for _ in range(2))
        for (m, a), (n, b) in itertools.combinations(enumerate(plain.heads), 2):
            far[m, n] = far[n, m] = np.mean([divergence(smooth[a][i], smooth[b][i]) for i in chosen])
            shared = hsic(grams[a], grams[a]) * hsic(grams[b], grams[b])
            apart[m, n] = apart[n, m] = 1 - np.clip(hsic(grams[a], grams[b]) / math.sqrt(shared), 0, 1)
        for n, head in enumerate(found.heads):
            others = [m for m in range(len(plain.heads)) if m != n]
            for value, of, table in ((head.pattern, head.pattern_of, far), (head.output, head.output_of, apart)):
                assert near(value, min(table[n, m] for m in others), LOOSE)
                assert of is not None and near(table[n, plain.heads.index(of)], value, LOOSE)
        for kept, table in ((found.patterns, far), (found.outputs, apart)):
            assert {tuple(sorted(map(plain.heads.index, group))) for group in kept} == joined(table, threshold)


def check_circuits(model: Mixed, plain: Plain, seed: int) -> None:
    ids = drawn_text(seed, 71)  # more than the 64 tokens at which copying is measured
    found, run, table = look.circuits(model, ids, most=10**4), plain.run(ids), compositions(plain)
    assert found.pairs == {kind: sum(key[0] == kind for key in table) for kind in "qkv"}
    assert {(one.kind, one.reader, one.writer) for one in found.compositions} == {*table}
    assert near([one.value for one in found.compositions],
                [table[one.kind, one.reader, one.writer] for one in found.compositions])  # fmt: skip
    assert {one.null for one in found.compositions} == {M**-0.5}
    few = look.circuits(model, ids, most=3).compositions
    for kind in "qkv":
        best = sorted((key for key in table if key[0] == kind), key=lambda key: -table[key])[:3]
        for some in (few, found.strongest(3)):
            assert [(one.kind, one.reader, one.writer) for one in some if one.kind == kind] == best
    final, U = plain.w["final.weight"], plain.w["unembed.weight"]
    sigma = np.sqrt((run.residual**2).mean(-1, keepdims=True) + 1e-6)
    for head in found.heads:
        call, written = run.calls[head.layer], run.calls[head.layer].written[head.head]
        update = call.written.sum(0)
        assert near(head.norm, np.linalg.norm(written, axis=1).mean(), LOOSE)
        assert near(head.share, (written * update).sum() / (update * update).sum(), LOOSE)
        assert near(head.residual, (written * run.residual).sum() / (run.residual**2).sum(), LOOSE)
        logits = (written / sigma * final) @ U.T
        gained = [logits[i, ids[i + 1]] - logits[i].mean() for i in range(70)]
        assert near(head.logit, np.mean(gained), 10 * LOOSE)
        hits: dict[int, list[bool]] = {1: [], -1: []}
        for place in [n * 71 // 64 for n in range(64)]:
            change = rms(call.v[head.head, place] @ call.W_O[head.head], final) @ U.T
            for sign in (1, -1):
                top = np.argsort(-(plain.w["unembed.bias"] + sign * change))[:5]
                hits[sign].append(ids[place] in top and sign * change[ids[place]] > 0)
        assert (head.copying, head.suppressing) == (np.mean(hits[1]), np.mean(hits[-1]))


def check_attribute(model: Mixed, plain: Plain, seed: int) -> None:
    ids = drawn_text(seed, 13)
    found, run = look.attribute(model, ids, 5, 23), plain.run(ids)
    towards = plain.w["final.weight"] * (plain.w["unembed.weight"][5] - plain.w["unembed.weight"][23])
    sigma = math.sqrt((run.residual[-1] ** 2).mean() + 1e-6)
    effects = [float(run.calls[layer].written[h, -1] @ towards / sigma) for layer, h in plain.heads]
    assert near([one.effect for one in found.heads], effects, LOOSE)
    assert near(found.difference, run.logits[-1, 5] - run.logits[-1, 23], LOOSE)
    assert near(found.rest, run.logits[-1, 5] - run.logits[-1, 23] - sum(effects), LOOSE)


def check_norm_weighted(model: Mixed, plain: Plain, seed: int) -> None:
    ids = drawn_text(seed, 17)
    found, run = look.norm_weighted(model, ids), plain.run(ids)
    for one in found.heads:
        call = run.calls[one.layer]
        p, moved = call.p[one.head], call.p[one.head] * lengths(call)[one.head]
        assert near(one.first, p[1:, 0].mean()) and near(one.moved, moved[1:].sum(1).mean(), LOOSE)
        assert near(one.first_moved, (moved[1:, 0] / moved[1:].sum(1)).mean())
        assert near(found.scores("moved")[one.layer][one.head], one.moved)
        weight, by_moved = look.norm_weighted_map(model, ids, one.layer, one.head)
        assert near(weight, p) and near(by_moved, moved, LOOSE)


def check_walk(model: Mixed, plain: Plain, seed: int) -> None:
    ids = drawn_text(seed, 11)
    run = plain.run(ids)
    for (layer, h), query in zip(plain.heads, itertools.cycle((10, 3, -4)), strict=False):
        found, call, i = look.walk(model, ids, layer=layer, head=h, query=query), run.calls[layer], query % 11
        assert near(found.scale, 0.61 if layer == 2 else call.q.shape[-1] ** -0.5)
        assert (found.query, found.token) == (i, str(ids[i]))
        whole = call.written[:, i].sum(0) + plain.w.get(f"layers.{layer}.o_proj.bias", 0.0)
        wanted = {"query": call.q[h, i], "head": call.out[h, i], "written": call.written[h, i], "layer": whole}
        assert all(near(found[name].values, vector, LOOSE) for name, vector in wanted.items())
        for j, key in enumerate(found.keys):
            assert near(key.key, call.k[h, j], LOOSE) and near(key.value, call.v[h, j], LOOSE)
            assert near((key.score, key.weight), (call.raw[h, i, j], call.p[h, i, j]), LOOSE)
            score = 7.3 * math.tanh(call.raw[h, i, j] / 7.3) if layer == 2 else call.raw[h, i, j]
            assert key.masked is None if not call.own[h, i, j] else near(key.masked, score, LOOSE)


def check_compare(model: Mixed, plain: Plain, seed: int) -> None:
    """Patterns and scores of two models on one text, and a head that `b` has no more."""
    ids, other = drawn_text(seed, 23), Mixed(seed + 7, ahead=model.ahead)
    a, b = (look.at(one, ids, repeats=None) for one in (model, other))
    runs = [plain.run(ids), Plain(other).run(ids)]
    for one in look.compare(a, b).heads:
        p, q = (over_keys(run.calls[one.layer].p[one.head]) for run in runs)
        assert near(one.moved, np.abs(p - q).sum(1).mean() / 2, 1e-4)
        assert near(one.divergence, np.mean([divergence(x, y) for x, y in zip(p, q, strict=True)]), 1e-4)
        beside = [means([run], one.layer, one.head) for run in runs]
        x, y = ([*some["offsets"], *some["ahead"]] for some in beside)
        assert near(one.near, (np.abs(np.subtract(x, y)).sum() + abs(sum(x) - sum(y))) / 2, 1e-4)
        places = a.head(one.layer, one.head).scores, b.head(one.layer, one.head).scores
        both = {name: (places[0][name].value, places[1][name].value) for name in places[0] if name in places[1]}
        assert one.scores == both and one.largest is not None
        assert abs(one.largest[2] - one.largest[1]) == max(abs(y - x) for x, y in both.values())
    ps, sides = (
        [[over_keys(x) for x in run.calls[1].p] for run in runs],
        [[means([run], 1, h) for h in range(6)] for run in runs],
    )
    masses = [[[*one["offsets"], *one["ahead"]] for one in some] for some in sides]

    def far(i: int, j: int) -> float:
        x, y = masses[0][i], masses[1][j]
        return float(np.abs(ps[0][i] - ps[1][j]).sum(1).mean() + np.abs(np.subtract(x, y)).sum() + abs(sum(x) - sum(y)))

    for left in itertools.combinations(range(6), 3):  # paired in order, so that the sum of distances is smallest
        fewer = replace(b, heads=tuple(h for h in b.heads if h.layer != 1 or h.head in left), maps=(), moved=())
        told = look.compare(a, fewer)
        best = min(itertools.combinations(range(6), 3), key=lambda some: sum(map(far, some, left)))
        assert [one.head for one in told.heads if one.layer == 1] == [*best] and told.guessed == (1,)
    kept = [0, 2, 5]
    fewer = replace(b, heads=tuple(h for h in b.heads if h.layer != 1 or h.head in kept), maps=(), moved=())
    told = look.compare(b, fewer, kept={1: kept})
    assert {(one.layer, one.head): one.moved for one in told.heads if one.layer == 1} == {(1, h): 0 for h in kept}
    assert told.gone == ((1, 1), (1, 3), (1, 4)) and not told.new


def check_curve(model: Mixed, plain: Plain, seed: int) -> None:
    seen = look.at(model, drawn_text(seed, 23), repeats=None)
    point = Point.of(3, seen, {"loss": 0.5})
    for role, layers in point.scores.items():
        values = {(h.layer, h.head): h.scores[role].value for h in seen.heads if role in h.scores}
        assert {(n, h): x for n, row in enumerate(layers) for h, x in enumerate(row) if x is not None} == {
            at: round(value, 4) for at, value in values.items()
        }
        assert point.best(role) == round(max(values.values()), 4)
        playing = [h for h in seen.heads if role in (x.name for x in h.roles)]
        by_value = sorted(playing, key=lambda h: -h.scores[role].value)
        assert [(h.layer, h.head) for h in seen.with_role(role)] == [(h.layer, h.head) for h in by_value]
        assert {*point.plays.get(role, ())} == {
            (h.layer, h.head) for h in seen.heads if role in (x.name for x in h.roles)
        }


CHECKS: dict[str, Callable[[Mixed, Plain, int], None]] = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}
KINDS: dict[str, tuple[str, ...]] = {
    "decoder": (*CHECKS,),
    "encoder": tuple(name for name in CHECKS if name not in ("importance", "ablate")),  # it has no next token to name
    "apart": ("at", "roles", "walk"),
}


EVERY = [(kind, name) for kind, names in KINDS.items() for name in names]
OF_ENCODERS = ("at", "roles", "pairs")  # which look ahead; in the other numbers an encoder is as a decoder


@pytest.mark.parametrize(
    ("kind", "name"), slow_except(EVERY, [case for case in EVERY if case[0] != "encoder" or case[1] in OF_ENCODERS])
)
def test_numbers_are_those_of_a_plain_model(kind: str, name: str) -> None:
    seed = 11 + [*KINDS].index(kind)
    model = Mixed(seed, ahead=kind == "encoder", apart=kind == "apart").eval()
    with torch.no_grad():
        exact, ids = Plain(model), drawn_text(seed, 19)
        assert near(model(torch.tensor([ids]))[0], exact.run(ids).logits, LOOSE)
    CHECKS[name](model, exact, seed)
