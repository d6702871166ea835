// 2. One head, one query: the score dimension by dimension, the softmax of the row, the values mixed.

let oneKey = null; // the key whose score is spelled out; null stands for the strongest

// The weights of the chosen head and query on the first keys.
const rowOf = (run, end) => range(end, (j) => weightOf(run.now, state.layer, state.head, state.query, j));

function strongestKeys(run, count) {
  const weights = rowOf(run, run.ids.length);
  return weights.map((_, j) => j).sort((a, b) => weights[b] - weights[a] || a - b).slice(0, count);
}

// A vector of a head at a place: q and k after rotation, v.
function vectorOf(layer, name, place, head) {
  const heads = name === "q" ? model.H : layer.K;
  const at = name === "q" ? head : Math.floor((head * layer.K) / model.H);
  return [...layer[name].subarray((place * heads + at) * model.D, (place * heads + at + 1) * model.D)];
}

function chooseHead(node) {
  const list = heads().map(([l, h]) => el("option", { value: nameOfHead(l, h) }, `head ${nameOfHead(l, h)}`));
  node.replaceChildren(...list);
  node.onchange = () => {
    const [layer, head] = placeOf(node.value);
    oneKey = null;
    lookAt({ layer, head });
  };
}

section("one", {
  build() {
    chooseHead(byId("one-head"));
    byId("one-query").onchange = (event) => {
      oneKey = null;
      lookAt({ query: Number(event.target.value) });
    };
    byId("one-key").onchange = (event) => {
      oneKey = Number(event.target.value);
      lookAt({});
    };
    byId("one-scale").onclick = () => change({ scaled: !state.scaled });
  },
  draw(run) {
    const options = (last) => range(last, (i) => el("option", { value: i }, tokenLabel(i, 14)));
    fill("one-query", ...options(run.ids.length));
    setPressed(byId("one-scale"), !state.scaled);
    say("one-scale-said", state.scaled ? `Each score becomes ${Math.sqrt(model.D).toFixed(1)} times as large.` : `Without the division the loss is ${run.now.loss.toFixed(2)}; the untouched model has ${run.plain.loss.toFixed(2)}.`);
    this.look(run);
  },
  look(run) {
    const seen = run.now.layers[state.layer];
    const i = state.query;
    const T = run.ids.length;
    const end = state.causal ? i + 1 : T;
    if (oneKey !== null && oneKey >= end) oneKey = null;
    const j = oneKey ?? strongestKeys(run, 1)[0];
    byId("one-head").value = nameOfHead(state.layer, state.head);
    byId("one-query").value = String(i);
    fill("one-key", ...range(end, (m) => el("option", { value: m }, tokenLabel(m, 14))));
    byId("one-key").value = String(j);
    fill("one-steps", this.score(seen, i, j), this.row(run, i, j, end), this.values(run, seen, end));
  },
  score(seen, i, j) {
    const [q, k] = [vectorOf(seen, "q", i, state.head), vectorOf(seen, "k", j, state.head)];
    const products = q.map((value, d) => value * k[d]);
    const sum = sumOf(products);
    const scaled = state.scaled ? sum / Math.sqrt(model.D) : sum;
    return el("div", { className: "step" }, el("h4", {}, "1. The score: query times key, number by number"),
      strip("q", `query ${tokenName(i)}`, q), strip("k", `key ${tokenName(j)}`, k), strip("q\u00d7k", "their product", products), signedBars(products),
      el("p", { className: "equation" }, `The ${model.D} products sum to ${sum.toFixed(2)}${state.scaled ? `, divided by \u221a${model.D} = ${Math.sqrt(model.D).toFixed(2)}: ` : "; nothing is divided: "}`, el("b", {}, `score ${scaled.toFixed(2)}`)));
  },
  row(run, i, j, end) {
    const weights = rowOf(run, end);
    const wide = Math.max(end * 6, 120);
    const svg = picture(wide, 84, `Weights of query ${i} on ${end} keys; the largest is ${Math.max(...weights).toFixed(3)}`).attr("preserveAspectRatio", "none").attr("class", "row-bars");
    const most = Math.max(...weights, 0.05);
    const from = wide / end;
    weights.forEach((weight, m) => {
      put(svg, "rect", { class: m === j ? "now" : "mass", x: m * from + 0.4, width: from - 0.8, y: 80 - (76 * weight) / most, height: (76 * weight) / most }).append("title").text(`${tokenLabel(m)}: ${weight.toFixed(4)}`);
    });
    svg.on("click", (event) => {
      const box = svg.node().getBoundingClientRect();
      oneKey = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * end), 0), end - 1);
      lookAt({});
    });
    return el("div", { className: "step" }, el("h4", {}, "2. The softmax of the row"), svg.node(),
      el("p", { className: "equation" }, `One bar for each key that query ${i} may see; all ${end} sum to ${sumOf(weights).toFixed(6)}. Key ${j} gets `, el("b", {}, weights[j].toFixed(3)), state.onePattern ? " (the mean of this layer's heads)." : "."));
  },
  values(run, seen, end) {
    const weights = rowOf(run, end);
    const scaled = weights.map((weight, m) => vectorOf(seen, "v", m, state.head).map((value) => value * weight));
    const sum = scaled.reduce((a, b) => a.map((value, d) => value + b[d]), new Array(model.D).fill(0));
    const shown = strongestKeys(run, 5).filter((m) => weights[m] > 0.005);
    const most = largest([...sum, ...shown.flatMap((m) => scaled[m])]);
    return el("div", { className: "step" }, el("h4", {}, "3. The values, mixed by the weights"),
      ...shown.map((m) => strip(weights[m].toFixed(2), `\u00d7 value ${tokenName(m)}`, scaled[m], most)), strip("sum", "the head's output", sum, most));
  },
});

claim("per-head-formula", (run) => {
  const T = run.ids.length;
  let most = 0;
  for (const { weights } of run.layers) for (let row = 0; row < weights.length / T; row++) most = Math.max(most, Math.abs(weights.subarray(row * T, (row + 1) * T).reduce((a, b) => a + b, 0) - 1));
  return tiny(most);
});
claim("scale", (run) => lossesSaid(run, { scaled: false }));
