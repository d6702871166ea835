"""Each number of the tour against Python: look, importance, regroup, plan, mixing, and the reference in float64."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browsers import MARKS, Page, launched
from tour_claims import Reference, Switches, default_ids, each_loss, logits, loss, reference, tokenizer
from transformers import AutoModelForCausalLM

from headwise import hf, look, models, nn, plan, reshape, tour
from headwise.tour import page as page_module
from headwise.tour.facts import cards, read_json

pytestmark = [*MARKS, pytest.mark.unchecked]
CLAIMS = page_module.claims()
VERDICTS = ("shown", "half true", "wrong", "not in this model", "not tested")
LAYERS, HEADS, WIDTH = 4, 8, 256
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page of the default text, with every number computed."""
    path = tmp_path_factory.mktemp("tour") / "tour.html"
    path.write_text(tour.render(tour.read(models.tiny_path()), models.default_text(), packaged=True))
    with launched() as chromium:
        opened = Page(chromium, path)
        opened.page.evaluate("window.headwise.drawAll()")
        yield opened.page
        opened.check_calm()


@pytest.fixture(scope="module")
def model() -> Any:
    return hf.load(str(models.tiny_path())).model


def numbers(text: str) -> list[float]:
    """The numbers of an output, heads' names left out."""
    plain = re.sub(r"\b\d\.\d (?=\d)", "", text.replace("\u2212", "-"))
    return [float(n.replace(",", "")) for n in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", plain)]


def moves(switches: Switches) -> float:
    return loss(switches) - loss()


def scores() -> dict[str, torch.Tensor]:
    """Mean weight of queries with a choice on the token before, the first and their own, (layers, heads)."""
    maps = torch.stack(reference()(default_ids()).weights)
    return {
        "previous-token": maps.diagonal(-1, 2, 3).mean(-1),
        "first-token sink": maps[:, :, 1:, 0].mean(-1),
        "self": maps.diagonal(0, 2, 3)[..., 1:].mean(-1),
    }


def two_strongest(role: str) -> list[float]:
    return scores()[role].flatten().sort(descending=True).values[:2].tolist()


def copies(page: Any, off: tuple[tuple[int, int], ...]) -> float:
    """Loss of the second copy of the page's random tokens, but for its first token."""
    ids = page.evaluate("window.headwise.randomTwice(40)")
    return float(each_loss(logits(tuple(ids), Switches(off=off)), ids)[41:].mean())


def sentence(page: Any, name: str) -> str:
    """A text of a preset, as its button puts it into the page."""
    script = (Path(page_module.__file__).parent / "js/sections/type.js").read_text()
    return str(re.search(rf'\["{name}", \(\) => "([^"]+)"', script)[1])  # type: ignore[index]


def costs() -> torch.Tensor:
    return torch.tensor([moves(Switches(off=((layer, h),))) for layer in range(LAYERS) for h in range(HEADS)])


WANTED: dict[str, Callable[[Any], list[float]]] = {
    "scale": lambda _: [loss(), loss(Switches(scaled=False))],
    "one-distribution": lambda _: [loss(), loss(Switches(onePattern=(0, 1, 2, 3)))],
    "reviewers": lambda _: [moves(Switches(onePattern=(layer,))) for layer in range(LAYERS)],
    "own-slice": lambda _: [256, 256],
    "two-ways": lambda _: [0],
    "heads-not-layers": lambda _: [LAYERS, HEADS, 32],
    "redundant": lambda _: [int((costs() < 0).sum()), 32],
    "not-moe": lambda _: [4 * WIDTH**2, 3 * WIDTH * 688],
    "concat": lambda _: [1.0],
    "prev-token": lambda _: two_strongest("previous-token"),
    "sinks": lambda _: two_strongest("first-token sink"),
    "induction": lambda page: [copies(page, ()), copies(page, ((2, 1),))],
    "at-once": lambda page: [loss(ids=list(tokenizer()(sentence(page, "trophy")).input_ids))],
    "example-sentence": lambda page: [len(tokenizer()(sentence(page, "agent")).input_ids) - 1],
    "no-mask-code": lambda _: [loss(), loss(Switches(causal=False))],
    "same-steps": lambda _: [0],
    "kv-cache": lambda _: [plan.of(str(models.tiny_path()), context=[128]).to_dict()["bytes_per_token"]],
    "mqa-gqa": lambda _: [LAYERS * 2 * kv * 32 * 2 for kv in (8, 4, 2, 1)],
    "quality": lambda _: [loss(), *(loss(Switches(kv=kv)) for kv in (4, 2, 1))],
    "card-terms": lambda _: [HEADS, WIDTH, HEADS, 32],
    "same-compute": lambda _: [1, 8],
    "cost-without-split": lambda _: [8],
    "four-squares": lambda _: [4 * 768**2, card("GPT-2 small")["attention_layer"]],
    "4h-matrices": lambda _: [25, 32],
    "four-projections": lambda _: [WIDTH**2],
    "g-8": lambda _: [card("DeepSeek-V3")["cache"]],
    "llama-3-8b": lambda _: llama(),
    "proportional": lambda _: read_at_a_step(),
    "more-heads": lambda _: [losses[0] for losses in swept().values()],
}
"""What each claim's output says, in order. What is a rounding error is in `SMALL`."""

NUMBERS: dict[str, Callable[[Any], float]] = {
    "loss": lambda _: loss(),
    "trophy": lambda page: loss(ids=list(tokenizer()(sentence(page, "trophy")).input_ids)),
    "no scale": lambda _: loss(Switches(scaled=False)),
    "one pattern": lambda _: loss(Switches(onePattern=(0, 1, 2, 3))),
    "price of 2.1": lambda _: moves(Switches(off=((2, 1),))),
    "all off": lambda _: loss(Switches(off=tuple(divmod(n, HEADS) for n in range(LAYERS * HEADS)))),
    "one head a layer": lambda _: loss(Switches(off=all_but_the_dearest())),
    "share of 2.1": lambda page: float(page.locator("#join-shares b").nth(1).text_content()),
    "shuffled": lambda page: numbers(shown(page, "order-of-heads"))[2],
    "first copy": lambda page: first_copy(page),
    "second copy": lambda page: copies(page, ()),
    "second copy without 2.1": lambda page: copies(page, ((2, 1),)),
    "no mask": lambda _: loss(Switches(causal=False)),
    "no positions": lambda _: loss(Switches(rotary=False)),
    "4 key-value heads": lambda _: loss(Switches(kv=4)),
    "2 key-value heads": lambda _: loss(Switches(kv=2)),
    "1 key-value head": lambda _: loss(Switches(kv=1)),
}
"""What the prose cites, by its name in facts.json."""

SMALL = {"per-head-formula": 1e-6, "w-o-only": 1e-4, "flash": 1e-5}
"""At most so much: the claim is that two ways of computing agree."""

ELSEWHERE = {"same-pair", "specialise", "interpretable", "w-o", "order-of-heads", "bag", "causal-mask-code", "nan-row"}
ELSEWHERE |= {"cross", "split-shapes"}
"""Claims that a test of their own holds against Python."""


def all_but_the_dearest() -> tuple[tuple[int, int], ...]:
    """All heads but that of the highest price in each layer."""
    best = costs().view(LAYERS, HEADS).argmax(1).tolist()
    return tuple((layer, head) for layer in range(LAYERS) for head in range(HEADS) if head != best[layer])


def first_copy(page: Any) -> float:
    ids = page.evaluate("window.headwise.randomTwice(40)")
    return float(each_loss(logits(tuple(ids)), ids)[:40].mean())


def swept() -> dict[int, list[float]]:
    """Held-out losses of the models of benchmarks/heads.py, by heads; those of one number by seed."""
    newest = sorted((ROOT / "benchmarks/results").glob("*-heads.json"))[-1]
    losses: dict[int, list[float]] = {}
    for row in json.loads(newest.read_text())["results"]:
        losses.setdefault(row["heads"], []).append(row["held_out_loss"])
    return losses


def card(name: str) -> dict[str, Any]:
    return next(row for row in cards() if row["name"] == name)


def llama() -> list[float]:
    row = card("Llama 3 8B")
    return [row["attention_layer"], row["attention_layer"] * row["layers"] / 1e9, 100 * row["share"]]


def read_at_a_step() -> list[float]:
    row = card("Llama 3 8B")
    cache = row["cache"] * 8192 / 2**30
    return [row["parameters"]["total"] * 2 / 2**30, cache, cache * row["heads"] / row["kv"]]


def shown(page: Any, name: str) -> str:
    return str(page.locator(f'[data-claim="{name}"] output').text_content())


@pytest.mark.parametrize("name", WANTED)
def test_the_number_is_pythons(page: Any, name: str) -> None:
    got, wanted = numbers(shown(page, name)), WANTED[name](page)
    assert len(got) == len(wanted), (shown(page, name), wanted)
    for one, other in zip(got, wanted, strict=True):
        digits = 0 if abs(other) >= 1000 else 2
        assert one == pytest.approx(other, abs=0.51 * 10**-digits if digits else 0.51, rel=2e-3 if other > 10 else 0), (
            name
        )


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_the_prose_is_pythons(page: Any, name: str) -> None:
    text = read_json("facts.json")["numbers"][name]
    assert float(text) == pytest.approx(NUMBERS[name](page), abs=0.501 * 10 ** -len(text.partition(".")[2]))


def test_all_numbers_of_the_prose_are_held() -> None:
    assert set(read_json("facts.json")["numbers"]) == set(NUMBERS)


def test_one_head_a_layer_leaves_the_dearest(page: Any) -> None:
    page.locator("#off-one").click()
    wanted = read_json("facts.json")["numbers"]["one head a layer"]
    for _ in range(100):
        if page.locator("#bar-loss").text_content().startswith(wanted):
            break
        page.wait_for_timeout(50)
    assert page.locator("#bar-loss").text_content().startswith(wanted)
    page.locator("#off-none").click()


def test_losses_by_heads_are_those_of_the_results(page: Any) -> None:
    """In the page's facts, in its table and as points of its chart."""
    wanted = swept()
    seeds = max(map(len, wanted.values()))
    rows = [[heads, *losses, *[None] * (seeds - len(losses))] for heads, losses in wanted.items()]
    assert read_json("facts.json")["heads"]["rows"] == rows
    assert page.locator("#heads-chart .point").count() == sum(map(len, wanted.values()))
    listed = page.eval_on_selector_all(
        "#cost .losses tbody tr", "(rows) => rows.map((r) => [...r.children].map((n) => n.textContent))"
    )
    assert [int(row[0]) * int(row[1]) for row in listed] == [WIDTH] * len(rows)
    text = (ROOT / "docs/how-many-heads.md").read_text("utf8")
    assert all(f" {loss:.3f} " in text for losses in wanted.values() for loss in losses)


@pytest.mark.parametrize("name", SMALL)
def test_two_ways_agree(page: Any, name: str) -> None:
    assert 0 <= numbers(shown(page, name))[0] <= SMALL[name]


def test_every_claim_with_a_number_has_a_check() -> None:
    with_number = {name for name, claim in CLAIMS.items() if claim["output"] is not None}
    assert with_number == set(WANTED) | set(SMALL) | ELSEWHERE


def test_every_claim_is_in_the_page_once_with_its_verdict(page: Any) -> None:
    ids = page.eval_on_selector_all(
        "[data-claim]", "(nodes) => nodes.map((n) => [n.dataset.claim, n.closest('section').id])"
    )
    assert sorted(ids) == sorted([claim["id"], claim["section"]] for claim in CLAIMS.values())
    listed = page.eval_on_selector_all("#ledger-rows tr", "(rows) => rows.map((r) => r.dataset.id)")
    assert listed == list(CLAIMS)
    assert {claim["verdict"] for claim in CLAIMS.values()} == set(VERDICTS) == set(page_module.VERDICTS)
    assert len(CLAIMS) >= 50


def test_the_chapter_shows_the_packaged_models_numbers_before_any_script(page: Any) -> None:
    """What is written into the page is what the page computes, to a unit of the last digit."""
    for name, claim in CLAIMS.items():
        if claim["output"] is None or name in SMALL or name in ("bag", "order-of-heads", "same-pair"):
            continue
        now, before = numbers(shown(page, name)), numbers(claim["output"])
        assert now == pytest.approx(before, abs=0.011), name


def test_prices_are_those_of_ablate(page: Any, model: Any) -> None:
    """The page, `headwise.look.importance` and the reference, of all heads."""
    wait = "[...document.querySelectorAll('#switches .cost')].map((n) => n.textContent)"
    got = [float(text.replace("\u2212", "-")) for text in page.evaluate(wait)]
    ids = torch.tensor([default_ids()])
    found = look.importance(model, ids, by=("zero",))
    wanted = [head["zero"] for head in found.to_dict()["heads"]]
    assert got == pytest.approx(wanted, abs=6e-4)
    assert got == pytest.approx(costs().tolist(), abs=6e-4)


def test_roles_are_those_of_look(page: Any) -> None:
    loaded = hf.load(str(models.tiny_path()))
    names = tokenizer().convert_ids_to_tokens(default_ids())
    ids = torch.tensor([default_ids()])
    seen = look.at(loaded.model, ids, tokens=names, delimiters=loaded.delimiters, repeats=None)  # as `headwise look`
    for role in ("previous-token", "first-token sink", "self", "delimiter"):
        page.locator("#grid-role").select_option(role)  # the grid is drawn before this returns
        got = page.eval_on_selector_all(
            "#maps .says", "(nodes) => nodes.map((n) => Number(n.textContent.split(' ')[1]))"
        )
        wanted = [head.scores[role].value for head in seen.heads]
        assert got == pytest.approx(wanted, abs=0.0051), role
        assert role == "delimiter" or scores()[role].flatten().tolist() == pytest.approx(wanted, abs=1e-4)
    known = {role.name: role.threshold for role in look.ROLES}
    assert {role["name"]: role["threshold"] for role in read_json("facts.json")["roles"]} == {
        role["name"]: known[role["name"]] for role in read_json("facts.json")["roles"]
    }


def test_heads_with_a_role_are_counted(page: Any) -> None:
    assert sum(numbers(shown(page, name))[0] for name in ("specialise", "interpretable")) == 32


def test_the_widest_pair(page: Any) -> None:
    low, high = numbers(shown(page, "same-pair"))
    weights = torch.stack(reference()(default_ids()).weights)
    lows, highs = weights.amin(1), weights.amax(1)
    below = torch.ones(lows.shape[1:], dtype=torch.bool).tril(-1)
    ratio = torch.where(below & (highs > 0.99), highs / lows, 0.0)
    assert math.log10(high / low) == pytest.approx(math.log10(float(ratio.max())), abs=0.1)


def test_mixing_is_that_of_nn(page: Any) -> None:
    """The cosine of each layer and the shares of layer 2, by `headwise.nn.measure_mixing` on the reference's heads."""
    run = reference(torch.float32)(default_ids())
    cosines = []
    for layer in range(LAYERS):
        mha = nn.MultiHeadAttention(WIDTH, HEADS, bias=False)
        with torch.no_grad():
            mha.o_proj.weight.copy_(Reference(torch.float32).tensors[f"model.layers.{layer}.self_attn.o_proj.weight"])
        mixing = nn.hooks.head_mixing.measure_mixing(mha, run.joined[layer][None])
        cosines.append(mixing.cosine)
        if layer == 2:
            got = page.eval_on_selector_all("#join-shares b", "(nodes) => nodes.map((n) => Number(n.textContent))")
            assert got == pytest.approx(list(mixing.share), abs=0.0051)
    assert numbers(shown(page, "w-o")) == pytest.approx(cosines, abs=0.0051)


def test_what_shuffling_and_permuting_do(page: Any) -> None:
    both, alone, moved = numbers(shown(page, "order-of-heads"))
    assert both < 1e-3 < 1 < alone and moved > loss()
    told, mask, positions = numbers(shown(page, "bag"))
    assert told < 1e-3 < 1 < min(mask, positions)


def test_the_bugs_of_textbook_code() -> None:
    """The text's code in torch: it raises, unless seq = heads; then later keys get weight. A masked row is NaN."""
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with pytest.raises(RuntimeError, match="size"):
        torch.zeros(5, 3, 5).masked_fill(mask, -torch.inf)
    weights = torch.randn(4, 4, 4).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    assert float(weights[0, 3, 1:].sum()) > 0  # query 0, the last head: it looks ahead
    assert torch.full((3,), -torch.inf).softmax(-1).isnan().all()
    assert (
        not __import__("headwise")
        .attention(*torch.randn(3, 1, 2, 3, 4), mask=__import__("headwise").keep(torch.zeros(3, 3, dtype=torch.bool)))
        .isnan()
        .any()
    )


def test_the_texts_page_numbers_of_the_bugs(page: Any) -> None:
    assert 0.5 < numbers(shown(page, "causal-mask-code"))[0] <= 1
    assert shown(page, "nan-row") == "NaN and 0"
    assert shown(page, "split-shapes").replace(" ", "") == "[4,16,512]\u2192[4,16,4,128]\u2192[4,4,16,128]"
    assert numbers(shown(page, "cross"))[0] == len(default_ids())


def test_the_plain_mean_is_that_of_regroup(tmp_path: Path) -> None:
    """The checkpoint's float16 rounds the means that the page keeps in float32."""
    ids = torch.tensor([default_ids()])
    for kv in (4, 2, 1):
        reshape.regroup(hf.checkpoint(models.tiny_path()), tmp_path / str(kv), kv, method="mean", proof=None)
        changed = AutoModelForCausalLM.from_pretrained(tmp_path / str(kv), dtype=torch.float32).eval()
        with torch.no_grad():
            got = each_loss(changed(ids, use_cache=False).logits[0], default_ids()).mean()
        assert float(got) == pytest.approx(loss(Switches(kv=kv)), abs=5e-3)


def test_the_reference_is_the_model(model: Any) -> None:
    with torch.no_grad():
        wanted = model(torch.tensor([default_ids()]), use_cache=False).logits[0]
    assert (wanted - logits(tuple(default_ids()))).abs().max() < 1e-4


def test_losses_beside_the_live_curve_are_those_of_the_results() -> None:
    """Written in docs/reshape-results.md, from benchmarks/results."""
    text = (Path(page_module.__file__).parents[3] / "docs/reshape-results.md").read_text("utf8")
    for row in read_json("facts.json")["regroup"]["rows"]:
        for value in row["losses"].values():
            assert f"{value:.3f}" in text, (row["label"], value)


def test_costs_are_those_of_plan_and_trace(page: Any) -> None:
    """The sliders' formulas on the shapes of all cards: parameters and cache as `headwise plan` has them."""
    shapes = [row for row in cards() if row["group"] is not None]
    tables = page.evaluate(
        """(count) => Array.from({ length: count }, (_, n) => {
          const list = document.getElementById('cost-cards');
          list.value = String(n);
          list.dispatchEvent(new Event('change'));
          return [...document.querySelectorAll('#cost-numbers tbody tr')].map((row) => row.children[1].textContent);
        })""",
        len(shapes),
    )
    for row, table in zip(shapes, tables, strict=True):
        parameters, cache = (int(table[n].replace(",", "")) for n in (0, 5))
        d, h, kv, dk = row["d_model"], row["heads"], row["kv"], row["d_k"]
        assert parameters == 2 * d * dk * (h + kv) and abs(row["attention_layer"] - parameters) <= 4 * h * dk + 2 * d
        assert cache == 4 * kv * dk


def test_formulas_are_made_of_what_stands_beside_them() -> None:
    convert = pytest.importorskip("latex2mathml.converter").convert
    for name, formula in read_json("formulas.json").items():
        assert formula["mathml"] == convert(formula["latex"], display="block"), name
