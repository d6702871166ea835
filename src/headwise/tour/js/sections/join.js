// 7. Concatenation and W_O: what each slice holds before and after, the parts that sum to the output, shuffled heads.

// Each head's part of a layer's output: head_i times its rows of W_O. Heads by T x width numbers.
function partsOf(layer, seen, T) {
  const { H, D, width } = model;
  const { o } = model.layers[layer];
  const { floats } = model.memory;
  return range(H, (h) => {
    const head = new Float32Array(T * D);
    for (let t = 0; t < T; t++) head.set(seen.concat.subarray((t * H + h) * D, (t * H + h + 1) * D), t * D);
    const rows = floats.slice(o.from + h * D * o.stride, o.from + (h + 1) * D * o.stride);
    const part = model.memory.product(head, T, D, rows, o.stride);
    const out = new Float32Array(T * width);
    for (let t = 0; t < T; t++) out.set(part.subarray(t * o.stride, t * o.stride + width), t * width);
    return out;
  });
}

// As `headwise.nn.measure_mixing`: shares of the output, energy of each slice by head, cosine of before and after.
function mixingOf(layer, seen, T) {
  const { H, D, width } = model;
  const parts = partsOf(layer, seen, T);
  const total = new Float64Array(T * width);
  for (const part of parts) for (let n = 0; n < total.length; n++) total[n] += part[n];
  let whole = 0;
  for (let n = 0; n < total.length; n++) whole += total[n] * total[n];
  whole ||= Number.MIN_VALUE;
  const slice = Uint8Array.from({ length: width }, (_, c) => Math.floor((c * H) / width));
  const [shares, energy] = [[], []];
  for (const part of parts) {
    const row = new Float64Array(H);
    let share = 0;
    for (let n = 0; n < total.length; n++) {
      share += part[n] * total[n];
      row[slice[n % width]] += part[n] * part[n];
    }
    shares.push(share / whole);
    energy.push(row);
  }
  const sums = range(H, (s) => energy.reduce((sum, row) => sum + row[s], 0) || Number.MIN_VALUE);
  let cosine = null;
  if (H * D === width) {
    cosine = mean(range(T, (t) => {
      let [ab, aa, bb] = [0, 0, 0];
      for (let c = 0; c < width; c++) {
        const [a, b] = [seen.concat[t * width + c], total[t * width + c]];
        ab += a * b;
        aa += a * a;
        bb += b * b;
      }
      return ab / Math.max(Math.sqrt(aa * bb), 1e-16);
    }));
  }
  return { shares, energy: energy.map((row) => [...row].map((value, s) => value / sums[s])), cosine, gap: largestDifference(total, seen.output) };
}

let mixings = {}; // of the last run, for two claims

async function mixingOfAll(run) {
  if (mixings.run === run) return mixings.all;
  const all = [];
  for (const [l, seen] of run.layers.entries()) {
    all.push(mixingOf(l, seen, run.ids.length));
    await later(CLAIM);
  }
  mixings = { run, all };
  return all;
}

const shuffleOrder = () => {
  const order = range(model.H, (h) => h);
  const mixed = shuffle(order, 3);
  return mixed.some((h, slot) => h !== slot) ? mixed : [...order.slice(1), 0];
};

async function shuffleHeads(run) {
  const order = shuffleOrder();
  const before = run.logits;
  const both = await forwardOf(run, { shuffle: order, outputToo: true });
  const alone = await forwardOf(run, { shuffle: order });
  return { order, both: largestDifference(before, both), alone: largestDifference(before, alone), loss: mean(losses(alone, run.ids, model.vocab)) };
}

section("join", {
  build() {
    fillLayers("join-layer");
    byId("join-layer").onchange = (event) => lookAt({ layer: Number(event.target.value) });
    byId("join-shuffle").onclick = async () => {
      if (!current) return;
      const run = current.plain;
      const { order, both, alone, loss } = await shuffleHeads(run);
      fill("join-shuffled", ...typeset(`New order ${order.join(" ")}. With W_O's rows: logits move by ${tiny(both)}. Without: by ${alone.toFixed(1)}, and the loss goes from ${run.loss.toFixed(2)} to ${loss.toFixed(2)}.`));
    };
  },
  look(run) {
    byId("join-layer").value = String(state.layer);
    const T = run.ids.length;
    const { shares, energy, cosine } = mixingOf(state.layer, run.now.layers[state.layer], T);
    const H = model.H;
    const matrix = (name, value) => {
      const svg = picture(20 + 22 * H, 20 + 22 * H, `${name}: share of each head in each slice`).attr("class", "shares");
      for (let s = 0; s < H; s++) {
        put(svg, "text", { x: 31 + 22 * s, y: 12, "text-anchor": "middle" }).text(s);
        put(svg, "text", { x: 12, y: 35 + 22 * s, "text-anchor": "middle" }).text(s);
        for (let h = 0; h < H; h++) {
          put(svg, "rect", { x: 21 + 22 * s, y: 20 + 22 * h, width: 20, height: 20, rx: 3, class: "track" });
          put(svg, "rect", { x: 21 + 22 * s, y: 20 + 22 * h, width: 20, height: 20, rx: 3, fill: `var(--role-${h % 12})`, opacity: Math.sqrt(value(h, s)).toFixed(3) }).append("title").text(`head ${h}, slice ${s}: ${value(h, s).toFixed(2)}`);
        }
      }
      return el("figure", {}, svg.node(), el("figcaption", {}, ...typeset(name)));
    };
    fill("join-before", matrix("before W_O: slice by head", (h, s) => Number(h === s)), matrix("after W_O", (h, s) => energy[h][s]));
    fill("join-shares", barList(shares.map((share, h) => [nameOfHead(state.layer, h), share, share.toFixed(2)])));
    say("join-said", `Layer ${state.layer}: how much of the output each head makes; the shares sum to 1.${cosine === null ? "" : ` Cosine between concatenation and output (1 would be the same direction): ${number(cosine, 2)}.`}`);
    fill("join-numbers", numbersOf(["head", ...range(H, (s) => `slice ${s}`)], energy.map((row, h) => [String(h), ...row.map((value) => value.toFixed(2))]), "Shares after W_O"));
  },
});

claim("concat", (run) => {
  const T = run.ids.length;
  const { concat, weights, v, K } = run.layers[0];
  return largestDifference(concat, model.mix(weights, v, T, T, K)) === 0 ? "1.00" : "not 1";
});
claim("w-o", async (run) => (await mixingOfAll(run)).map(({ cosine }) => number(cosine, 2)).join(" "));
claim("w-o-only", async (run) => tiny(Math.max(...(await mixingOfAll(run)).map(({ gap }) => gap))));
claim("order-of-heads", async (run) => {
  const { both, alone, loss } = await shuffleHeads(run);
  return `logits by ${tiny(both)} together, by ${alone.toFixed(1)} alone; loss alone ${loss.toFixed(2)}`;
});
