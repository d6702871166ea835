"""Importance of heads: each criterion against one computed by hand, from whole matrices and changed weights."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, Row
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import headwise
from headwise.look import HeadImportance, Importance, ablate, importance
from headwise.look.interventions.gradients import ranks, spearman
from headwise.nn import MultiHeadAttention, output_projections, probe
from headwise.testing.constructed import constructed

TEXT = [1, 7, 23, 11, 5, 7, 31, 2, 47, 23, 11]
OTHER = [1, 13, 3, 43, 17, 13, 3]
DECODERS = ("GPT-2", "Llama GQA", "gpt-oss sinks", "DeepSeek-V3")


@functools.cache
def built(name: str) -> PreTrainedModel:
    return BY_NAME[name].build()


@functools.cache
def projections(model: nn.Module) -> dict[str, str]:
    return output_projections(model, lambda model: model(torch.tensor([TEXT])))


@contextmanager
def cut(model: nn.Module, module: str, head: int, heads: int, scale: float, fill: Tensor | None = None) -> Any:
    """One head's numbers scaled (and something added) where its output projection reads them: not our machinery."""

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        side_by_side = args[0].clone().unflatten(-1, (heads, -1))
        side_by_side[..., head, :] = side_by_side[..., head, :] * scale + (0.0 if fill is None else fill)
        return (side_by_side.flatten(-2),)

    hook = model.get_submodule(projections(model)[module]).register_forward_pre_hook(before)
    yield
    hook.remove()


def loss_of(model: nn.Module, text: list[int] = TEXT) -> float:
    ids = torch.tensor([text])
    with torch.no_grad():
        return float(cross_entropy(model(ids).logits[0, :-1], ids[0, 1:]))


def calls_of(model: nn.Module, text: list[int] = TEXT) -> list[headwise.nn.AttentionCall]:
    with torch.no_grad(), probe(model) as seen:
        model(torch.tensor([text]))
    return seen.calls


@pytest.mark.parametrize("name", DECODERS)
def test_every_criterion_is_what_its_definition_says(name: str) -> None:
    model = built(name)
    result = importance(model, [TEXT, OTHER], by=("contribution", "mean", "zero", "gradient"))
    assert result.by == ("gradient", "zero", "mean", "contribution") and (result.texts, result.tokens) == (2, 18)
    losses = [loss_of(model, text) for text in (TEXT, OTHER)]
    assert result.loss == pytest.approx(sum(losses) / 2, abs=1e-5)
    calls = [calls_of(model, text) for text in (TEXT, OTHER)]
    assert len(result.heads) == sum(call.query.shape[1] for call in calls[0])
    for head in result.heads:
        one = calls[0][head.layer]
        H, K = one.query.shape[1], one.key.shape[1]
        assert (head.module, head.group, head.call) == (one.module, head.head * K // H, 0)
        outs = [call[head.layer].attend()[0] for call in calls]
        mean = torch.cat([out[head.head] for out in outs]).mean(0)
        with cut(model, head.module, head.head, H, 0.0):
            zero = [loss_of(model, text) - loss for text, loss in zip((TEXT, OTHER), losses, strict=True)]
        assert head.zero == pytest.approx(sum(zero) / 2, abs=2e-5)
        with cut(model, head.module, head.head, H, 0.0, mean):
            after = [loss_of(model, text) - loss for text, loss in zip((TEXT, OTHER), losses, strict=True)]
        assert head.mean == pytest.approx(sum(after) / 2, abs=2e-5)
        step, slopes = 5e-3, []
        for text in (TEXT, OTHER):
            sides = []
            for sign in (1, -1):
                with cut(model, head.module, head.head, H, 1 + sign * step):
                    sides.append(loss_of(model, text))
            slopes.append(abs(sides[0] - sides[1]) / (2 * step))
        assert head.gradient_raw == pytest.approx(sum(slopes) / 2, rel=0.02, abs=1e-3)
        group = slice(head.group * (H // K), (head.group + 1) * (H // K))
        matrix = model.get_submodule(projections(model)[head.module]).weight.detach()
        matrix = (matrix.mT if name == "GPT-2" else matrix).unflatten(1, (H, -1))[:, group].flatten(1)
        written = torch.cat([out[group].transpose(0, 1).flatten(1) @ matrix.mT for out in outs]).detach()
        assert head.contribution == pytest.approx(float(written.norm(dim=-1).mean()), rel=1e-4)
    for layer, rows in enumerate(result.scores("gradient")):
        assert torch.tensor(rows).norm() == pytest.approx(1.0, abs=1e-5)
        raw = torch.tensor(result.scores("gradient_raw")[layer])
        torch.testing.assert_close(torch.tensor(rows), raw / raw.norm())


def test_heads_on_the_way_matter_and_the_others_do_not() -> None:
    """Induction by composition, on a text that repeats: both heads of the circuit, no other.

    The slope knows the second alone: attention there is decided by so wide a margin that small changes move nothing.
    """
    model, jobs = constructed([["self", "previous-token", "broad"], ["induction", "duplicate-token"]])
    text = model.sample(17)[0].tolist()
    result = importance(model, text + text[1:], by=("gradient", "zero", "mean", "contribution"))
    for head in result.heads:
        job = jobs[head.layer, head.head]
        for by in ("zero", "mean"):
            assert (abs(getattr(head, by)) > 1e-3) == (job in ("previous-token", "induction")), (head, by)
        assert (head.gradient_raw > 1e-3) == (job == "induction"), head
    read = text + text[1:]
    lost = ablate(model, read, [(0, 1)])
    assert lost.after > lost.before + 1
    assert all(read[place.position] in read[: place.position] for place in lost.places)


def test_the_absolute_value_is_taken_of_each_text() -> None:
    """Two texts of opposite slopes would cancel else."""
    model = built("Llama GQA")
    both = importance(model, [TEXT, OTHER]).scores("gradient_raw")
    single = [importance(model, text).scores("gradient_raw") for text in (TEXT, OTHER)]
    torch.testing.assert_close(torch.tensor(both), torch.tensor(single).mean(0))
    assert bool((torch.tensor(both) > 0).all())


def test_the_stability_is_the_agreement_of_halves() -> None:
    """Of several texts, every other with the rest; of one, the loss on its first half with that on its second."""
    model = built("Llama GQA")

    def flat(result: Importance) -> list[float]:
        return [x for row in result.scores("gradient") for x in row]

    texts = [importance(model, text) for text in (TEXT, OTHER)]
    both = importance(model, [TEXT, OTHER])
    assert both.stability == pytest.approx(spearman(*map(flat, texts)))

    def half(places: slice) -> Any:
        def loss(output: Any, ids: Tensor) -> Tensor:
            return cross_entropy(output.logits[:, places].flatten(0, 1), ids[:, 1:][:, places].flatten())[None]

        return loss

    halves = [importance(model, TEXT, loss=half(places)) for places in (slice(0, 5), slice(5, 10))]
    assert texts[0].stability == pytest.approx(spearman(*map(flat, halves)))
    assert halves[0].stability is None, "a loss of the user's own has no halves"
    assert f"gradient between two halves of the text: {both.stability:.2f}" in " ".join(str(both).split())


def test_the_table_sorts_across_layers_by_the_change_of_the_loss() -> None:
    heads = (
        HeadImportance("a", 0, 0, 0, 0, gradient=0.9, gradient_raw=0.1),
        HeadImportance("b", 0, 1, 0, 0, gradient=0.5, gradient_raw=0.7),
    )
    found = Importance("m", 1, 7, 1.5, ("gradient",), heads, (), 0.0)
    lines = [" ".join(line.replace("│", " ").split()) for line in str(found).splitlines()]
    assert lines.index("1 0 0.5000 0.7000") < lines.index("0 0 0.9000 0.1000")


def test_the_model_is_left_as_it_was() -> None:
    model = BY_NAME["Llama GQA"].build().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    importance(model, TEXT, by=("gradient", "zero"))
    assert model.training and model.config._attn_implementation == "eager"
    for name, p in model.named_parameters():
        assert p.grad is None and torch.equal(p, before[name])
    frozen = BY_NAME["Llama GQA"].build().requires_grad_(False)
    assert importance(frozen, TEXT).scores("gradient") == importance(model, TEXT).scores("gradient")
    with torch.no_grad():
        assert importance(nn.DataParallel(model), TEXT).scores("gradient") == importance(model, TEXT).scores("gradient")


def test_an_encoder_names_masked_words() -> None:
    model = built("BERT")
    text = "is an encoder: in 'bert.encoder.layer.0.attention.self' a token sees those after it"
    with pytest.raises(ValueError, match=text):
        importance(model, TEXT)
    result = importance(model, TEXT, mask_id=3, by=("gradient", "zero"), seed=5)
    again = importance(model, TEXT, mask_id=3, by=("gradient", "zero"), seed=5)
    assert result == dataclasses.replace(again, seconds=result.seconds)
    assert result.loss != importance(model, TEXT, mask_id=3, seed=7).loss
    read: list[Tensor] = []

    def loss(output: Any, ids: Tensor) -> Tensor:
        read.append(ids)
        return output.logits.float().logsumexp(-1).mean(-1)

    own = importance(model, TEXT, loss=loss, by="zero")
    assert torch.equal(read[0][0], torch.tensor(TEXT)) and len(own.heads) == 8
    head = own.heads[5]
    with torch.no_grad():
        before = float(model(torch.tensor([TEXT])).logits.logsumexp(-1).mean())
        with cut(model, head.module, head.head, 4, 0.0):
            after = float(model(torch.tensor([TEXT])).logits.logsumexp(-1).mean())
    assert head.zero == pytest.approx(after - before, abs=1e-5)


def test_masked_words_are_fifteen_in_a_hundred_and_alone_count() -> None:
    from headwise.look.interventions.losses import readings

    text = list(range(2, 42))
    [reading] = readings(built("BERT"), [text], loss=None, mask_id=50, seed=0)
    hidden = reading.inputs[0][0] == 50
    assert int(hidden.sum()) == 6 and not hidden[0] and not hidden[-1]
    assert torch.equal(reading.labels[0][hidden], torch.tensor(text)[hidden])
    assert bool((reading.labels[0][~hidden] == -100).all())
    with torch.no_grad():
        logits = built("BERT")(reading.inputs[0]).logits[0]
    expected = cross_entropy(logits[hidden], torch.tensor(text)[hidden])
    torch.testing.assert_close(reading.losses(built("BERT"))[0], expected)
    for seed in range(30):
        [short] = readings(built("BERT"), [[2, 3, 5, 7, 11]], loss=None, mask_id=50, seed=seed)
        assert set((short.inputs[0][0] == 50).nonzero().flatten().tolist()) <= {1, 2, 3}, seed


def test_an_encoder_decoder_says_the_text_again() -> None:
    model = built("T5")
    result = importance(model, TEXT, by=("gradient", "zero", "contribution"))
    ids = torch.tensor([TEXT])
    decoder = torch.cat([torch.tensor([[1]]), ids[:, :-2]], dim=1)
    with torch.no_grad():
        before = model(ids, decoder_input_ids=decoder).logits[0]
    assert result.loss == pytest.approx(float(cross_entropy(before, ids[0, :-1])), abs=1e-5)
    assert [head.module.split(".")[0] for head in result.heads[::4]] == ["encoder"] * 2 + ["decoder"] * 4


def test_shared_layers_have_a_head_for_each_call() -> None:
    result = importance(built("ALBERT"), TEXT, mask_id=3, by=("gradient", "zero"))
    assert [(head.layer, head.call) for head in result.heads[::4]] == [(0, 0), (1, 1), (2, 2)]
    assert len({head.zero for head in result.heads}) == 12


class Reader(nn.Module):
    """Two layers of our modules: head 1 of the second alone says the next word, which is the present one plus one."""

    def __init__(self) -> None:
        super().__init__()
        n = 13
        self.embed = nn.Embedding(n, n)
        self.layers = nn.ModuleList(MultiHeadAttention(n, 3, head_dim=4, value_dim=n) for _ in range(2))
        with torch.no_grad():
            self.embed.weight.copy_(torch.eye(n))
            for layer in self.layers:
                layer.o_proj.weight.zero_()
                for projection in (layer.q_proj, layer.k_proj):
                    projection.weight.normal_(std=0.1)
                layer.v_proj.weight.copy_(torch.eye(n).repeat(3, 1))
            self.layers[1].o_proj.weight[:, n : 2 * n] = 9 * torch.eye(n).roll(1, 0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask=headwise.window(1))
        return x


def test_the_head_that_does_the_work_is_known_by_every_criterion() -> None:
    model, text = Reader(), [3, 4, 5, 6, 7, 8, 9]
    result = importance(model, text, by=("gradient", "zero", "mean", "contribution"))
    for name in result.by:
        rows = torch.tensor(result.scores(name))
        assert int(rows.argmax()) == 4, name
        assert bool((rows.flatten()[[0, 1, 2, 3, 5]].abs() <= 1e-6).all()), name
    assert result.loss < 0.01 and result.heads[4].zero > 2


# --- numbers of many heads, and their order ---------------------------------------------------------------------------


def test_rows_of_a_batch_are_heads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many run side by side."""
    model = built("Llama GQA")
    alike = []
    for rows in (1, 3, 32):
        monkeypatch.setattr("headwise.look.interventions.gates.ROWS", rows)
        done: list[tuple[int, int]] = []
        alike.append(importance(model, TEXT, by="zero", progress=lambda *a, done=done: done.append(a)).scores("zero"))
        assert done[-1] == (9, 9) and [a for a, _ in done] == sorted(a for a, _ in done)
    torch.testing.assert_close(torch.tensor(alike[0]), torch.tensor(alike[1]), atol=3e-6, rtol=0)
    torch.testing.assert_close(torch.tensor(alike[0]), torch.tensor(alike[2]), atol=3e-6, rtol=0)


def test_ranks_and_their_correlation() -> None:
    assert ranks([3.0, 1.0, 3.0, 7.0, 3.0]).tolist() == [2.0, 0.0, 2.0, 4.0, 2.0]
    for a, b, rho in (
        ([1, 2, 3, 4], [10, 20, 30, 1000], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([106, 86, 100, 101, 99, 103, 97, 113, 112, 110], [7, 0, 27, 50, 28, 29, 20, 12, 6, 17], -29 / 165),
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5),
    ):
        assert spearman([*map(float, a)], [*map(float, b)]) == pytest.approx(rho)
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


def test_the_record_travels_and_prints() -> None:
    from rich.console import Console

    result = importance(built("Llama GQA"), TEXT, by=("zero", "gradient"), name="mine")
    data = json.loads(result.to_json())
    assert data["model"] == "mine" and data["by"] == ["gradient", "zero"] and len(data["heads"]) == 8
    assert data["heads"][3]["mean"] is None and data["agreements"][0]["first"] == "gradient"
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(result.table(most=3))
    text = " ".join(console.export_text().split())
    assert "mine: loss" in text and "3 of 8 heads" in text
    with pytest.raises(ValueError, match="measured were gradient, zero; got 'mean'; name it in by="):
        result.scores("mean")
    assert isinstance(result, Importance)


# --- ablation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_ablation_says_what_is_lost_and_what_is_said_instead(by: str) -> None:
    model = built("Llama GQA")
    lost = ablate(model, [TEXT, OTHER], [(1, 2), (0, 3)], by=by, decode=lambda i: f"<{i}>")
    single = importance(model, [TEXT, OTHER], by=by).scores(by)
    assert [(x.layer, x.head) for x in lost.heads] == [(1, 2), (0, 3)]
    for x in lost.heads:
        assert x.loss - lost.before == pytest.approx(single[x.layer][x.head], abs=2e-5)
    texts, calls = (TEXT, OTHER), [calls_of(model, text) for text in (TEXT, OTHER)]
    fills = [
        torch.cat([call[n].attend()[0, h] for call in calls]).mean(0) if by == "mean" else None
        for n, h in ((1, 2), (0, 3))
    ]
    names = [call.module for call in calls[0]]
    after, kls, probabilities = [], [], {}
    for number, text in enumerate(texts):
        ids = torch.tensor([text])
        with torch.no_grad():
            before = model(ids).logits[0].log_softmax(-1)
            with cut(model, names[1], 2, 4, 0.0, fills[0]), cut(model, names[0], 3, 4, 0.0, fills[1]):
                then = model(ids).logits[0].log_softmax(-1)
        after.append(float(cross_entropy(then[:-1], ids[0, 1:])))
        kls += [(float(kl), number, at) for at, kl in enumerate((before.exp() * (before - then)).sum(-1))]
        probabilities[number] = before.exp(), then.exp()
    assert lost.after == pytest.approx(sum(after) / 2, abs=2e-5)
    assert lost.kl == pytest.approx(sum(kl for kl, _, _ in kls) / 18, abs=2e-5)
    for place, (kl, text, at) in zip(lost.places, sorted(kls, reverse=True), strict=False):
        assert (place.text, place.position) == (text, at) and place.kl == pytest.approx(kl, abs=3e-5)
        assert place.token == f"<{texts[text][at]}>"
        b, a = (x[at] for x in probabilities[text])
        assert [x.id for x in place.tokens] == (a - b).abs().topk(3).indices.tolist()
        for x in place.tokens:
            assert (x.before, x.after) == pytest.approx((float(b[x.id]), float(a[x.id])), abs=2e-5)
    assert len(lost.places) == 5 and json.loads(lost.to_json())["after"] == lost.after


def test_a_head_that_writes_nothing_is_not_missed() -> None:
    lost = ablate(Reader(), [3, 4, 5, 6, 7, 8, 9], [(0, 0)])
    assert lost.before == lost.after == lost.heads[0].loss and lost.kl == 0


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.unchecked
def test_what_does_not_fit_is_refused() -> None:
    model = built("Llama GQA")
    bare, total = model.model, lambda output, ids: output.logits.sum()
    for kind, text, run in (
        (ValueError, "by names .* zero, mean, contribution; got 'size'", lambda: importance(model, TEXT, by="size")),
        (ValueError, "at least 3 tokens; got 2", lambda: importance(model, [1, 2])),
        (ValueError, "ids of this model are 0 to 52; got 53", lambda: importance(model, [*TEXT, 53])),
        (ValueError, "ids of this model are 0 to 52; got 99", lambda: importance(model, TEXT, mask_id=99)),
        (ValueError, "a loss on the next token needs logits .* gave BaseModelOutput", lambda: importance(bare, TEXT)),
        (ValueError, r"a float for each row of the batch, \(1,\)", lambda: importance(model, TEXT, loss=total)),
        (TypeError, r"loss is a function \(output, ids\) -> .*; got 3", lambda: importance(model, TEXT, loss=3)),
        (TypeError, "ids are the integers a tokenizer gives", lambda: importance(model, "text")),
        (ValueError, "layers of this model are 0 to 1; got head 2.0", lambda: ablate(model, TEXT, [(2, 0)])),
        (ValueError, "heads of layer 1 are 0 to 3; got head 1.4", lambda: ablate(model, TEXT, [(1, 4)])),
        (ValueError, "heads of layer 1 are 0 to 3; got head 1.-1", lambda: ablate(model, TEXT, [(1, -1)])),
        (ValueError, r"name at least one head, each once, .*; got \[\]", lambda: ablate(model, TEXT, [])),
        (ValueError, r"each once, .*; got \[\(1, 2\), \(1, 2\)\]", lambda: ablate(model, TEXT, [(1, 2), (1, 2)])),
        (ValueError, "by is 'zero' or 'mean'; got 'half'", lambda: ablate(model, TEXT, [(1, 2)], by="half")),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            run()
    latent = Row("x", "DeepseekV3ForCausalLM", "DeepseekV3Config", 2, sizes=BY_NAME["DeepSeek-V3"].sizes).build()
    latent.model.layers[1].self_attn.o_proj = nn.Sequential(nn.Tanh(), latent.model.layers[1].self_attn.o_proj)
    text = "by='contribution' needs the module that reads the heads of 'model.layers.1.self_attn' side by side"
    with pytest.raises(ValueError, match=text):
        importance(latent, TEXT, by="contribution")
