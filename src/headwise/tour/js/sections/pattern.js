// 3. One pattern for all heads of a layer, and what it costs.

section("pattern", {
  build() {
    byId("pattern-switch").onclick = () => change({ onePattern: !state.onePattern });
    fillLayers("pattern-layer");
    byId("pattern-layer").value = String(model.L - 1);
    byId("pattern-layer").onchange = () => current && this.draw(current);
  },
  draw(run) {
    const T = run.ids.length;
    const layer = Number(byId("pattern-layer").value);
    const { weights } = run.plain.layers[layer];
    const average = onePattern(weights, model.H, T, T);
    const figure = (name, data, from) => {
      const canvas = el("canvas", {});
      drawMap(canvas, data, from, T, T, true);
      return el("figure", {}, canvas, el("figcaption", {}, name));
    };
    fill("pattern-maps", ...range(model.H, (h) => figure(nameOfHead(layer, h), weights, h * T * T)), figure("their mean", average, 0));
    setPressed(byId("pattern-switch"), state.onePattern);
    say("pattern-said", state.onePattern ? `On: every head uses its layer's mean. Loss ${run.now.loss.toFixed(2)}, untouched ${run.plain.loss.toFixed(2)}.` : "Off: each head uses its own pattern.");
    const pair = widestPair(run.plain);
    fill("pattern-pair", el("p", {}, `Query ${pair.i} `, el("bdi", {}, tokenName(pair.i)), `, key ${pair.j} `, el("bdi", {}, tokenName(pair.j)), `, under the heads of layer ${pair.l}:`),
      barList(range(model.H, (h) => weightOf(run.plain, pair.l, h, pair.i, pair.j)).map((value, h) => [nameOfHead(pair.l, h), value, value < 0.0005 ? value.toExponential(0) : value.toFixed(3)]), 1));
  },
});

// The pair of different tokens whose weights, under two heads of one layer, differ most: by ratio, among weights near 1.
function widestPair(run) {
  const T = run.ids.length;
  let best = { ratio: -1, l: 0, i: Math.min(1, T - 1), j: 0 };
  run.layers.forEach(({ weights }, l) => {
    for (let i = 1; i < T; i++) for (let j = 1; j < i; j++) {
      let [low, high] = [Infinity, 0];
      for (let h = 0; h < model.H; h++) {
        const weight = weights[(h * T + i) * T + j];
        low = Math.min(low, weight);
        high = Math.max(high, weight);
      }
      if (high > 0.99 && high / low > best.ratio) best = { ratio: high / low, l, i, j, low, high };
    }
  });
  return best;
}

claim("one-distribution", (run) => lossesSaid(run, { onePattern: true }));
claim("same-pair", (run) => {
  const { low, high } = widestPair(run);
  return low === undefined ? "no pair of this text is near 1" : `${low.toExponential(0)} and ${high.toFixed(3)}`;
});
claim("reviewers", async (run) => {
  const out = [];
  for (let l = 0; l < model.L; l++) {
    out.push(signed((await lossOf(run, { onePattern: range(model.L, (m) => m === l) })) - run.loss, 2));
  }
  return out.join(" ");
});
