// 12. What attention costs, by the numbers that one chooses.

// Counts of one layer's attention, as `headwise plan` and `headwise trace` have them.
function costOf({ d, h, kv, dk, T, B }) {
  const projections = d * (2 * h + 2 * kv) * dk;
  return {
    parameters: projections,
    projecting: B * T * projections,
    scoring: 2 * B * h * T * T * dk,
    exponentials: B * h * T * T,
    scoreBytes: B * h * T * T * DTYPE,
    cache: 2 * kv * dk * DTYPE,
  };
}

const SIZES = ["d", "h", "kv", "dk", "T", "B"];

function showCost() {
  const asked = Object.fromEntries(SIZES.map((name) => [name, Number(byId(`cost-${name}`).value)]));
  const fits = Object.values(asked).every((n) => Number.isInteger(n) && n > 0 && n <= 1e6) && asked.h % asked.kv === 0;
  say("cost-wrong", fits ? "" : "Whole numbers above 0, please, and key-value heads that divide the heads.");
  if (!fits) return;
  const { d, h, kv, dk, T, B } = asked;
  const cost = costOf(asked);
  const one = costOf({ ...asked, h: 1, kv: 1, dk: h * dk });
  fill("cost-shapes", tableOf(["stage", "shape"], [
    ["input", [B, T, d]], ["q", [B, h, T, dk]], ["k, v", [B, kv, T, dk]], ["scores, weights", [B, h, T, T]], ["heads", [B, h, T, dk]], ["concatenation", [B, T, h * dk]], ["output", [B, T, d]],
  ].map(([name, shape]) => [name, `[${shape.join(", ")}]`])));
  fill("cost-numbers", tableOf(["one layer", `${h} heads of ${dk}`, `against one head of ${h * dk}`], [
    ["parameters", "parameters"], ["multiply-adds, projections", "projecting"], ["multiply-adds, scores and values", "scoring"],
    ["exponentials", "exponentials"], ["scores, 2 bytes each", "scoreBytes", bytes], ["cache, bytes a token", "cache"],
  ].map(([label, name, shown = thousands]) => [label, shown(cost[name]), `\u00d7 ${Number((cost[name] / one[name]).toPrecision(3))}`])));
}

function setCost(values) {
  for (const [name, value] of Object.entries(values)) byId(`cost-${name}`).value = String(value);
  showCost();
}

// Models that differ in the number of heads alone: their losses, a line for each seed.
function showHeads() {
  const { rows } = chapter.heads;
  const losses = rows.flatMap(([, ...values]) => values).filter((value) => value !== null);
  const seeds = rows[0].slice(1);
  const lines = seeds.map((_, seed) => ({ name: `seed ${seed}`, colour: seed, points: rows.filter((row) => row[seed + 1] !== null).map((row) => [String(row[0]), row[seed + 1]]) }));
  const [least, most] = [Math.min(...losses), Math.max(...losses)];
  fill("heads-chart", keyOf(lines), lineChart({ lines, x: { log: true, values: rows.map(([heads]) => String(heads)) }, y: [least - (most - least) / 4, most + (most - least) / 4], label: "Held-out loss by number of heads a layer", xName: "heads a layer", yName: "held-out loss, nats a token" }));
}

section("cost", {
  build() {
    for (const name of SIZES) byId(`cost-${name}`).oninput = showCost;
    const own = { d: model.width, h: model.H, kv: model.K, dk: model.D, T: 128, B: 1 };
    const shown = chapter.cards.filter(({ group }) => group !== null);
    fill("cost-cards", el("option", { value: "" }, "this model"), ...shown.map(({ name }, n) => el("option", { value: n }, name)));
    byId("cost-cards").onchange = (event) => {
      const card = shown[Number(event.target.value)];
      setCost(event.target.value === "" ? own : { d: card.d_model, h: card.heads, kv: card.kv, dk: card.d_k });
    };
    byId("cost-full").onclick = () => setCost({ ...own, dk: own.d });
    setCost(own);
    showHeads();
  },
});

const COST_BASE = { d: 256, h: 8, kv: 8, dk: 32, T: 128, B: 1 };
claim("same-compute", () => {
  const [many, one] = [costOf(COST_BASE), costOf({ ...COST_BASE, h: 1, kv: 1, dk: 256 })];
  return `\u00d7 ${(many.projecting + many.scoring) / (one.projecting + one.scoring)}, \u00d7 ${many.exponentials / one.exponentials}`;
});
claim("cost-without-split", () => `\u00d7 ${costOf({ ...COST_BASE, dk: 256 }).parameters / costOf(COST_BASE).parameters}`);
claim("four-squares", () => {
  const { parameters } = costOf({ ...COST_BASE, d: 768, h: 12, kv: 12, dk: 64 });
  return `${thousands(parameters)}, with biases ${thousands(parameters + 4 * 768)}`;
});
claim("4h-matrices", () => `${3 * 8 + 1}, not ${4 * 8}`);
claim("four-projections", () => {
  const { q, k, v, o } = model.layers[0];
  const sizes = [q, k, v, o].map(({ N, K }) => thousands(N * K));
  return new Set(sizes).size === 1 ? sizes[0] : sizes.join(", ");
});
