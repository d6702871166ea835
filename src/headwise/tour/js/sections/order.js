// 9. Mask and positions: switched off, tested by permuting the tokens, and two bugs of textbook code.

// What may tell the order of the tokens.
const TOLD_BY = [["neither", { causal: false, rotary: false }], ["mask alone", { rotary: false }], ["positions alone", { causal: false }]];

// The same tokens in another order, computed, and put back in their places: the largest difference of logits.
async function permuted(run, options) {
  const T = run.ids.length;
  const order = shuffle(range(T, (t) => t), 5);
  const before = Object.keys(options).length ? await forwardOf(run, options) : run.logits;
  const after = await forwardOf({ ids: order.map((t) => run.ids[t]) }, options);
  let most = 0;
  order.forEach((t, place) => {
    most = Math.max(most, largestDifference(before.subarray(t * model.vocab, (t + 1) * model.vocab), after.subarray(place * model.vocab, (place + 1) * model.vocab)));
  });
  return most;
}

const softmax = (row) => {
  const most = Math.max(...row);
  const powers = row.map((value) => Math.exp(value - most));
  const sum = sumOf(powers);
  return powers.map((value) => value / sum);
};

// scores[query][head][key] with a mask of (seq, seq) broadcast onto (heads, seq): head h gets the mask's row h.
function leak(size, seed = 11) {
  const draw = generator(seed);
  const scores = range(size, () => range(size, () => range(size, () => 8 * draw() - 4)));
  const weights = scores.map((heads) => heads.map((row, h) => softmax(row.map((value, j) => (j > h ? -Infinity : value)))));
  let most = 0;
  weights.forEach((heads, i) => heads.forEach((row) => row.forEach((weight, j) => j > i && (most = Math.max(most, weight)))));
  return { weights, most };
}

// A row with nothing allowed: by the textbook, and as headwise defines it.
const textbookRow = () => softmax([-Infinity, -Infinity, -Infinity]);

section("order", {
  build() {
    byId("order-mask").onclick = () => change({ causal: !state.causal });
    byId("order-positions").onclick = () => change({ rotary: !state.rotary });
    const { weights, most } = leak(4);
    fill("leak", el("div", { className: "scroll" }, tableOf(["query", "head", "key 0", "key 1", "key 2", "key 3"], [0, 1].flatMap((i) => weights[i].map((row, h) => [String(i), String(h), ...row.map((weight, j) => `${weight.toFixed(2)}${j > i && weight > 0 ? " leaks" : ""}`)])), `4 tokens, 4 heads: queries 0 and 1. Of all four queries, the largest weight on a later key is ${most.toFixed(2)}.`)));
    say("nan", `softmax of (\u2212\u221e, \u2212\u221e, \u2212\u221e) = (${textbookRow().map((value) => (Number.isNaN(value) ? "NaN" : value)).join(", ")})`);
    byId("permute").onclick = async () => {
      if (!current) return;
      const run = current.plain;
      const shown = [];
      for (const [name, options] of [...TOLD_BY, ["both, as trained", {}]]) shown.push([name, tiny(await permuted(run, options))]);
      fill("permuted", tableOf(["what tells the order", "largest difference of logits"], shown));
    };
  },
  look(run) {
    setPressed(byId("order-mask"), !state.causal);
    setPressed(byId("order-positions"), !state.rotary);
    say("order-said", `Mask ${state.causal ? "on" : "off"}, positions ${state.rotary ? "on" : "off"}: loss ${run.now.loss.toFixed(2)}; untouched ${run.plain.loss.toFixed(2)}.${state.causal ? "" : " Without the mask a low loss means nothing: the model sees the token that it should predict."}`);
    drawHead(byId("order-map"), run.now, state.layer, state.head);
    say("order-head", `Head ${nameOfHead(state.layer, state.head)} with these switches. For another head, press [ or ], or click one in section 5.`);
  },
});

claim("bag", async (run) => {
  const out = [];
  for (const [name, options] of TOLD_BY) {
    out.push(`${name} ${tiny(await permuted(run, options))}`);
  }
  return out.join("; ");
});
claim("causal-mask-code", () => leak(4).most.toFixed(2));
claim("nan-row", () => `${textbookRow().every(Number.isNaN) ? "NaN" : "a number"} and 0`);
claim("no-mask-code", (run) => lossesSaid(run, { causal: false }));
