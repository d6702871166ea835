"""How large a report gets: within its budget whatever the look, the coarse parts first."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from looks import make_look, random_look, words
from reports import Elements, inflated

from headwise import report
from headwise.look import ROLES, HeadMap, Score
from headwise.report import deflate as squeeze
from headwise.report import maps, pack
from headwise.report import numbers as numbers_module

LIMIT = 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "heads"), [(12, 12), (32, 32)])
def test_incompressible_maps_keep_below_two_megabytes(layers: int, heads: int, tmp_path: Path) -> None:
    size = report.write(random_look(layers, heads), tmp_path / "r.html")
    assert size < LIMIT
    data = Elements((tmp_path / "r.html").read_text()).data
    assert sum(a * b for a, b in zip(data["maps"]["rows"], data["maps"]["columns"], strict=True)) == len(inflated(data))


@pytest.mark.slow
@pytest.mark.parametrize("played", [3, 99])
def test_many_heads_with_their_scores_keep_to_the_budget(played: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 x 64, as a sixteenth of the heads in a sixteenth of the room; all roles of texts and copies."""
    monkeypatch.setattr(pack, "BUDGET", pack.BUDGET // 16)
    monkeypatch.setattr(pack, "NUMBERS_BUDGET", pack.NUMBERS_BUDGET // 16)
    draw = np.random.default_rng(3)
    names = [role.name for role in ROLES if role.reads in ("text", "copies")]
    first, heads = make_look(layers=1, heads=1).heads[0], []
    for i, rows in enumerate(draw.random((320, len(names), 4)).round(5).tolist()):
        scores = {
            name: Score(name, row[0], row[1], 0.5, 999, row[2], row[3], plays=row[0] > 0.9 and n < played)
            for n, (name, row) in enumerate(zip(names, rows, strict=True))
        }
        heads.append(replace(first, layer=i // 4, head=i % 4, module=f"model.layers.{i // 4}.attn", scores=scores))
    maps_ = tuple(HeadMap(32, 32, draw.bytes(1024)) for _ in heads)
    data = pack.page_data(replace(make_look(), heads=tuple(heads), maps=maps_))
    numbers = json.loads(inflated(data, "numbers"))
    assert len(data["numbers"]["data"]) + len(data["maps"]["data"]) <= pack.BUDGET
    monkeypatch.setattr(pack, "BUDGET", len(data["numbers"]["data"]) + len(data["maps"]["data"]) - 4)
    tighter = pack.page_data(replace(make_look(), heads=tuple(heads), maps=maps_))  # maps get the rest
    assert len(tighter["numbers"]["data"]) + len(tighter["maps"]["data"]) <= pack.BUDGET
    shown = [role["label"] for role in data["numbers"]["roles"]]
    own = data["numbers"]["own"]
    for h in (0, 250, 319):
        assert len(numbers["roles"][h]) == len(heads[h].roles)
        for i in numbers["roles"][h]:
            assert numbers["values"][own + i][h] == pytest.approx(heads[h].scores[shown[i]].value, abs=1e-4)


@pytest.mark.slow
def test_twelve_by_twelve_keeps_its_cells_at_the_worst() -> None:
    data = Elements(report.render(random_look())).data
    assert data["maps"]["rows"] == data["maps"]["columns"] == [128] * 144
    codes = np.frombuffer(inflated(data), np.uint8).astype(float)
    weights = np.frombuffer(b"".join(m.data for m in random_look().maps), np.uint8)
    np.testing.assert_allclose(
        codes / (data["maps"]["levels"] - 1), weights / 255.0, atol=0.5001 / (data["maps"]["levels"] - 1)
    )


def test_a_plain_look_of_that_size_is_small_and_exact(tmp_path: Path) -> None:
    look = make_look(layers=12, heads=12, tokens=words(128))
    assert report.write(look, tmp_path / "r.html") < 1_400_000
    assert Elements((tmp_path / "r.html").read_text()).data["maps"]["levels"] == 256


@pytest.mark.parametrize("size", [100, 300_000])
def test_the_budget_holds_to_its_last_byte(size: int) -> None:
    """Small parts come out when the squeezer ends, large ones before: both count."""
    parts = [np.random.default_rng(2).bytes(size)] * 2
    whole = squeeze.squeezed(parts, 10**9)
    assert whole is not None
    packed = len(base64.b64decode(whole))
    for spare, fits in ((0, True), (-1, False)):
        assert (squeeze.squeezed(parts, -(-4 * (packed + spare) // 3)) is not None) is fits


def test_the_finest_step_that_fits_is_taken() -> None:
    """With ever less room: fewer levels first, then fewer cells, and at last an error."""
    large = random_look(1, 2).maps
    sizes = []
    for side, levels in maps.STEPS:
        text = squeeze.squeezed([maps.in_levels(maps.pooled(m, side).data, levels) for m in large], 10**9)
        assert text is not None
        sizes.append(-(-4 * len(base64.b64decode(text)) // 3))
    for budget in sorted({*sizes, *(size - 1 for size in sizes)}):
        first = next((step for step, size in zip(maps.STEPS, sizes, strict=True) if size <= budget), None)
        if first is None:
            with pytest.raises(ValueError, match="shows up to about 10,000 heads, got 2; look at a part of the model"):
                maps.packed(large, budget)
        else:
            result = maps.packed(large, budget)
            assert (result["levels"], result["rows"]) == (first[1], [first[0]] * 2)


def test_numbers_that_do_not_fit_lose_their_details_first() -> None:
    """Nulls of roles that are not played, then evidence, then roles that nobody plays; the values played stay."""
    heads = make_look(layers=2, heads=5).heads
    whole = numbers_module.packed(heads, 10**9)
    assert whole["complete"]
    seen = []
    budget = len(whole["data"])
    while True:
        try:
            result = numbers_module.packed(heads, budget)
        except ValueError as error:
            assert "shows up to about 10,000 heads, got 10; look at a part" in str(error)
            break
        columns = json.loads(zlib.decompress(base64.b64decode(result["data"]), -zlib.MAX_WBITS))
        pieces = max(len(one) for shown in columns["evidence"] for one in shown)
        nulls = sum(x is not None for column in columns["nulls"] for x in column)
        seen.append((nulls, pieces, bool(columns["offsets"][0]), len(result["roles"])))
        assert columns["roles"] == json.loads(zlib.decompress(base64.b64decode(whole["data"]), -15))["roles"]
        budget = len(result["data"]) - 4
    played = sum(score.null is not None for head in heads for score in head.roles)
    assert seen[0][0] > played and [nulls for nulls, *_ in seen[1:]] == [played] * (len(seen) - 1)
    order = [(3, True, 7), (1, True, 7), (0, True, 4), (0, False, 4), (0, False, 4), (0, False, 4)]
    assert [rest for _, *rest in seen] == [list(one) for one in order]


@pytest.mark.parametrize("rows", [9, 41, 128, 97])
@pytest.mark.parametrize("side", [16, 37])
def test_pooling_keeps_the_mass_of_a_row(rows: int, side: int) -> None:
    matrix = np.random.default_rng(0).dirichlet(np.ones(61), size=rows)
    large = HeadMap(rows, 61, np.rint(255 * np.sqrt(matrix)).astype(np.uint8).tobytes())
    small = maps.pooled(large, side)
    weights = np.array(small.weights())
    assert weights.shape == (min(rows, side), side)
    np.testing.assert_allclose(weights.sum(1), 1, atol=0.05)
    edges = [-(-i * 61 // side) for i in range(side + 1)]
    row_edges = [-(-i * rows // min(rows, side)) for i in range(side + 1)]
    wanted = matrix[row_edges[3] : row_edges[4], edges[5] : edges[6]].sum(1).mean()
    assert weights[3, 5] == pytest.approx(wanted, abs=0.01)


def test_maps_of_what_moves_have_the_cells_of_the_weights_or_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(4)
    look = make_look(layers=2, heads=3)
    size = look.maps[0].rows
    drawn = tuple(HeadMap(size, size, draw.bytes(size * size)) for _ in look.heads)
    data = pack.page_data(replace(look, moved=(*drawn[:5], HeadMap(0, 0, b""))))
    assert data["moved"]["lacking"] == [5] and len(inflated(data, "moved")) == len(inflated(data, "maps"))
    monkeypatch.setattr(pack, "BUDGET", len(data["numbers"]["data"]) + 4 * size * size)
    tight = pack.page_data(replace(look, maps=drawn, moved=drawn))
    alone = pack.page_data(replace(look, maps=drawn))
    assert tight["maps"]["columns"] == alone["maps"]["columns"] and tight["moved"]["data"] == ""
    total = sum(len(tight[name]["data"]) for name in ("numbers", "maps", "moved", "vectors"))
    assert total <= pack.BUDGET
