"""The engine of the tour against float64: every switch, WebAssembly and plain JavaScript, tokens, cache, counts."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsers import MARKS, Page, launched, until
from hostile import PAYLOADS
from tour_claims import Switches, default_ids, logits, tokenizer

from headwise import models, tour

pytestmark = [*MARKS, pytest.mark.unchecked]
FACTOR = 1.5  # of the largest error of torch in float32, which sums in blocks as the page does
FLOOR = 2e-6  # of an error, in logits: below that a comparison says nothing

SWITCHES = {
    "none": Switches(),
    "heads off": Switches(off=((0, 3), (2, 1), (3, 7))),
    "no mask": Switches(causal=False),
    "no positions": Switches(rotary=False),
    "no scale": Switches(scaled=False),
    "one pattern": Switches(onePattern=(0, 1, 2, 3)),
    "one pattern in layer 2": Switches(onePattern=(2,)),
    **{f"{kv} key-value heads": Switches(kv=kv) for kv in (4, 2, 1)},
    "several": Switches(off=((1, 2),), causal=False, kv=2, onePattern=(3,)),
}
TEXTS = {
    "one token": [0],
    "five": [0, 300, 41, 7, 300],
    "160": [0, *(random.Random(3).choices(range(2, 2048), k=159))],
}

LOGITS = """({ ids, options, off }) => {
  const list = Array.from({ length: 4 }, (_, l) => Array.from({ length: 8 },
    (_, h) => off.some(([a, b]) => a === l && b === h)));
  const out = window.headwise.forward(ids, options, { off: list });
  const bytes = new Uint8Array(out.buffer, out.byteOffset, out.byteLength);
  let text = '';
  for (let i = 0; i < bytes.length; i += 4096) text += String.fromCharCode(...bytes.subarray(i, i + 4096));
  return btoa(text);
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tour") / "tour.html"
    path.write_text(tour.render(tour.read(models.tiny_path()), models.default_text(), packaged=True))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as chromium:
        yield chromium


@pytest.fixture(scope="module", params=["wasm", "js"])
def engine(request: pytest.FixtureRequest, browser: Any, written: Path) -> Iterator[Any]:
    address = "" if request.param == "wasm" else "#engine=js&t=def%20f(a):%20return%20a"  # slow: its own text is short
    page = Page(browser, written, address)
    assert page.page.evaluate("document.documentElement.dataset.engine") == request.param
    yield page.page
    page.check_calm()
    page.context.close()


def logits_of(page: Any, ids: list[int], switches: Switches) -> torch.Tensor:
    options = {name: getattr(switches, name) for name in ("causal", "rotary", "scaled", "kv")}
    options["onePattern"] = [layer in switches.onePattern for layer in range(4)]
    packed = page.evaluate(LOGITS, {"ids": ids, "options": options, "off": [list(head) for head in switches.off]})
    return torch.from_numpy(np.frombuffer(base64.b64decode(packed), np.float32).reshape(len(ids), -1).copy())


@pytest.mark.parametrize("name", SWITCHES)
def test_logits_are_as_exact_as_those_of_torch(engine: Any, name: str) -> None:
    switches, ids = SWITCHES[name], default_ids()
    exact = logits(tuple(ids), switches)
    plain = (logits(tuple(ids), switches, torch.float32).double() - exact).abs().max()
    ours = (logits_of(engine, ids, switches).double() - exact).abs().max()
    assert float(ours) <= max(FACTOR * float(plain), FLOOR), (name, float(ours), float(plain))


@pytest.mark.parametrize("name", TEXTS)
def test_logits_of_other_lengths(engine: Any, name: str) -> None:
    ids = TEXTS[name]
    exact = logits(tuple(ids))
    plain = (logits(tuple(ids), dtype=torch.float32).double() - exact).abs().max()
    ours = (logits_of(engine, ids, Switches()).double() - exact).abs().max()
    assert float(ours) <= max(FACTOR * float(plain), FLOOR), (name, float(ours), float(plain))


def test_steps_with_the_cache_give_the_same_bits(engine: Any) -> None:
    differing = engine.evaluate(
        """(ids) => {
          const whole = window.headwise.forward(ids), model = window.headwise.model(), cache = model.newCache(161);
          let differ = 0;
          ids.forEach((id, t) => window.headwise.forward([id], {}, { cache })
            .forEach((v, n) => { if (v !== whole[t * model.vocab + n]) differ++; }));
          return [differ, whole.length];
        }""",
        default_ids(),
    )
    assert differing == [0, 128 * 2048]


def test_the_product_is_the_plain_loop(engine: Any) -> None:
    """On drawn shapes, within rounding of the sum of absolute products; with the tails of rows that shapes have."""
    worst = engine.evaluate(
        """() => {
          const { memory } = window.headwise.model(); let seed = 7, worst = 0;
          const draw = () => { seed = (Math.imul(seed, 1103515245) + 12345) & 0x7fffffff; return seed / 0x7fffffff; };
          for (let n = 0; n < 100; n++) {
            const [T, K, N] = [1 + Math.floor(draw() * 23), 1 + Math.floor(draw() * 67),
              8 * (1 + Math.floor(draw() * 9))];
            const a = Float32Array.from({ length: T * K }, () => draw() - 0.5);
            const b = Float32Array.from({ length: K * N }, () => draw() - 0.5);
            const y = memory.product(a, T, K, b, N);
            for (let t = 0; t < T; t++) for (let c = 0; c < N; c++) {
              let [sum, size] = [0, 0];
              for (let k = 0; k < K; k++) { const p = a[t * K + k] * b[k * N + c]; sum += p; size += Math.abs(p); }
              worst = Math.max(worst, Math.abs(y[t * N + c] - sum) / (size * (K + 1)));
            }
          }
          return worst;
        }"""
    )
    assert worst <= 2**-24


@pytest.mark.parametrize("engine", ["wasm"], indirect=True)  # no product is computed: both engines have one tokenizer
def test_tokens_are_those_of_transformers(engine: Any) -> None:
    draw = random.Random(11)
    spaces = "\u0085\u00a0\u1680\u2003\u2028\u202f\u3000\ufeff\u200b\x1c\x0b \t\n\r"
    alphabets = ["abc 123_.,()\n\t'", spaces + "ab1", "\u00e9\u4f60\U0001f642\u0301\u0930\u094d"]
    texts = [text for text in PAYLOADS if not any("\ud800" <= c <= "\udfff" for c in text)]
    texts += ["".join(draw.choices(draw.choice(alphabets), k=draw.randint(0, 30))) for _ in range(4000)]
    pool = [c for c in range(1, 0x110000) if not 0xD800 <= c <= 0xDFFF]
    texts += ["".join(map(chr, draw.choices(pool, k=draw.randint(1, 12)))) for _ in range(2000)]
    shown = engine.evaluate("(texts) => texts.map((text) => window.headwise.ids(text))", texts)
    wanted = tokenizer()(texts).input_ids
    wrong = [(text, a, b) for text, a, b in zip(texts, shown, wanted, strict=True) if a != b]
    assert len(texts) > 6000 and wrong == []


def test_a_change_costs_only_the_layers_behind_it(engine: Any) -> None:
    """The last layer's head costs one layer, the first layer's four; going back costs none.

    What the heads of that layer see does not depend on which are off, so one attention less is computed.
    """
    engine.evaluate("window.scrollTo(0, 0)")
    for key, cost in (("3.2", 1), ("2.1", 2), ("0.0", 4)):
        settled(engine)
        before = engine.evaluate("({ ...window.headwise.counts })")
        engine.locator(f'#switches [data-item="{key}"]').evaluate("(node) => node.click()")
        until(
            engine,
            f"document.getElementById('bar-changes').textContent === 'head {key} off'",
        )
        after = engine.evaluate("({ ...window.headwise.counts })")
        engine.evaluate("document.getElementById('reset').click()")
        until(engine, "document.getElementById('bar-changes').textContent === 'no change'")
        assert [after[name] - before[name] for name in ("layers", "attentions")] == [cost, cost - 1], key


def test_prices_cost_only_what_a_head_changes(engine: Any) -> None:
    """Eight heads of each layer: that layer without its attention, and the layers above it whole."""
    settled(engine)
    before = engine.evaluate("({ ...window.headwise.counts })")
    engine.evaluate("document.getElementById('price').click()")
    until(engine, "!document.getElementById('price').disabled")
    after = engine.evaluate("({ ...window.headwise.counts })")
    assert [after[name] - before[name] for name in ("layers", "attentions")] == [8 * (4 + 3 + 2 + 1), 8 * (3 + 2 + 1)]


def settled(page: Any) -> None:
    """Waits until nothing that is near the view is left to draw or to measure."""
    page.evaluate("window.headwise.refresh()")


def test_the_weights_are_the_checkpoints(written: Path) -> None:
    """Planes, unpacked again, are the bytes of the file."""
    checkpoint = tour.read(models.tiny_path())
    raw = (models.tiny_path() / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, _, shape, start in checkpoint.tensors:
        begin, end = header[name]["data_offsets"]
        size = int(np.prod(shape))
        high, low = (np.frombuffer(checkpoint.numbers, np.uint8, size, start + part * size) for part in (0, 1))
        assert np.stack([low, high], 1).tobytes() == raw[8 + length + begin : 8 + length + end], name
