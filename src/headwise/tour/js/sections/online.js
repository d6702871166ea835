// 13. One row, key by key: the softmax without the row ever being whole.

// Running maximum, sum and output of a row, after each key.
function onlineRow(scores, value, D) {
  let [most, sum, out] = [-Infinity, 0, new Float64Array(D)];
  return scores.map((score, j) => {
    const higher = Math.max(most, score);
    const [keep, add] = [Math.exp(most - higher), Math.exp(score - higher)];
    sum = sum * keep + add;
    const v = value(j);
    out = out.map((number, d) => number * keep + add * v[d]);
    const grew = higher > most;
    most = higher;
    return { score, most, sum, out, grew };
  });
}

function rowNow(run, layer, head, i) {
  const seen = run.layers[layer];
  const q = vectorOf(seen, "q", i, head);
  const scores = range(i + 1, (j) => sumOf(vectorOf(seen, "k", j, head).map((value, d) => value * q[d])) / Math.sqrt(model.D));
  return onlineRow(scores, (j) => vectorOf(seen, "v", j, head), model.D);
}

section("online", {
  build() {
    byId("online-key").oninput = () => current && this.draw(current);
    byId("online-T").oninput = () => this.tiles();
    this.tiles();
  },
  look(run) {
    const i = Math.max(state.query, Math.min(11, run.ids.length - 1));
    const rows = rowNow(run.plain, state.layer, state.head, i);
    const slider = byId("online-key");
    slider.max = String(rows.length - 1);
    if (Number(slider.value) >= rows.length) slider.value = String(rows.length - 1);
    const j = Number(slider.value);
    const now = rows[j];
    slider.setAttribute("aria-valuetext", `key ${j} of ${rows.length}`);
    fill("online-said", `Head ${nameOfHead(state.layer, state.head)}, query ${i}, after key ${j} `, el("bdi", {}, tokenName(j)), `: score ${now.score.toFixed(2)}, maximum `, el("b", {}, now.most.toFixed(2)), `, sum `, el("b", {}, now.sum.toFixed(3)), now.grew && j ? ". The maximum rose, so all that was summed before was scaled down." : ".");
    const full = Math.max(rows.length * 8, 160);
    const svg = picture(full, 70, "Scores key by key, with the running maximum").attr("preserveAspectRatio", "none").attr("class", "row-bars");
    const y = d3.scaleLinear([Math.min(...rows.map(({ score }) => score)), Math.max(...rows.map(({ most }) => most), 0.1)], [66, 6]);
    const wide = full / rows.length;
    rows.forEach(({ score }, n) => put(svg, "rect", { class: n === j ? "now" : n < j ? "mass" : "track", x: n * wide + 0.5, width: wide - 1, y: y(score), height: Math.max(70 - y(score), 1) }));
    put(svg, "path", { class: "line", stroke: "var(--ink)", d: `M${rows.slice(0, j + 1).map(({ most }, n) => `${n * wide},${y(most)}H${(n + 1) * wide}`).join("L")}` });
    fill("online-row", svg.node());
    fill("online-out", strip("now", "so far, o / \u2113", [...now.out].map((value) => value / now.sum)), strip("end", "whole row", [...rows.at(-1).out].map((value) => value / rows.at(-1).sum)));
  },
  tiles() {
    const T = 2 ** Number(byId("online-T").value);
    say("online-bytes", `${thousands(T)} tokens: a head's whole matrix has ${bytes(T * T * 2)}; a tile of 128 by 128 has ${bytes(128 * 128 * 2)}, whatever the length.`);
    byId("online-T").setAttribute("aria-valuetext", `${thousands(T)} tokens`);
  },
});

claim("flash", (run) => {
  const T = run.ids.length;
  let most = 0;
  run.layers.forEach((seen, l) => {
    for (let h = 0; h < model.H; h++) {
      const last = rowNow(run, l, h, T - 1).at(-1);
      for (let d = 0; d < model.D; d++) most = Math.max(most, Math.abs(last.out[d] / last.sum - seen.concat[((T - 1) * model.H + h) * model.D + d]));
    }
  });
  return tiny(most);
});
