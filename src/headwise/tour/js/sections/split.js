// 4. How one matrix serves eight heads: the bands of W_Q, the view and the transpose, and both ways of computing it.

const STEPS = ["x", "project", "view", "transpose"];
const split = { step: 0, which: "q" };

function drawBands() {
  const place = model.layers[state.layer][split.which];
  const { N, K } = place;
  const canvas = byId("split-weights");
  canvas.width = K;
  canvas.height = N;
  const context = canvas.getContext("2d");
  const image = context.createImageData(K, N);
  let square = 0;
  for (let n = 0; n < N; n++) for (let k = 0; k < K; k++) square += model.weight(place, n, k) ** 2;
  const most = 2.5 * Math.sqrt(square / (N * K)) || 1;
  for (let n = 0, at = 0; n < N; n++) for (let k = 0; k < K; k++, at += 4) {
    const value = model.weight(place, n, k) / most;
    const [red, green, blue] = value < 0 ? BELOW : ABOVE;
    image.data[at] = red;
    image.data[at + 1] = green;
    image.data[at + 2] = blue;
    image.data[at + 3] = Math.round(255 * Math.abs(value)); // 255 at most: the array clamps
  }
  context.putImageData(image, 0, 0);
  const count = N / model.D;
  fill("split-bands", ...range(count, (h) => el("span", {}, `head ${h}`)));
  const name = `W_${split.which.toUpperCase()}`;
  fill("split-caption", ...typeset(`${name} of layer ${state.layer} as it is stored: ${N} rows by ${K} columns, cut into ${count} bands of ${model.D} rows. Each band reads all ${K} columns. The stored matrix is the transpose of ${name} in the formula: rows here are columns there. Orange is above 0, blue below.`));
}

function drawStep(run) {
  const T = run.ids.length;
  const row = Math.min(state.query, T - 1);
  const { before, q } = run.plain.layers[state.layer];
  const x = rmsNorm(before.subarray(row * model.width, (row + 1) * model.width), 1, model.width, model.layers[state.layer].norm1, model.eps);
  const query = [...q.subarray(row * model.H * model.D, (row + 1) * model.H * model.D)];
  const cut = range(model.H, (h) => query.slice(h * model.D, (h + 1) * model.D));
  const most = largest(query);
  const said = [
    `Token ${row}: its ${model.width} numbers, normalised. Shape of the whole text: (B, T, d) = (1, ${T}, ${model.width}).`,
    `Times W_Q: ${model.H * model.D} numbers again, all computed from all ${model.width}. Shape (1, ${T}, ${model.H * model.D}).`,
    `View: the same ${model.H * model.D} numbers, read as ${model.H} rows of ${model.D}. Nothing is computed. Shape (1, ${T}, ${model.H}, ${model.D}).`,
    `Transpose: heads before tokens, so that each head's tokens stand together. Shape (1, ${model.H}, ${T}, ${model.D}).`,
  ];
  const rows = [
    [strip("x", `token ${tokenName(row)}`, [...x])],
    [strip("q", "projected", query)],
    cut.map((part, h) => strip(`${h}`, `head ${h}`, part, most)),
    [0, 1].flatMap((h) => [Math.max(row - 1, 0), row].map((t) => strip(`${h}, ${t}`, `head ${h}, token ${tokenName(t, 8)}`, [...q.subarray((t * model.H + h) * model.D, (t * model.H + h + 1) * model.D)]))),
  ];
  fill("split-said", ...typeset(said[split.step]));
  fill("split-rows", ...rows[split.step]);
  [...byId("split-steps").children].forEach((node, n) => setPressed(node, n === split.step));
}

// Many small products against one large one, on this text: the largest difference, and how long each took.
function bothWays(run) {
  const T = run.ids.length;
  const place = model.layers[state.layer].q;
  const x = rmsNorm(run.layers[state.layer].before, T, model.width, model.layers[state.layer].norm1, model.eps);
  const { floats } = model.memory;
  const wide = up(model.D, 8);
  const bands = range(model.H, (h) => {
    const band = new Float32Array(model.width * wide);
    for (let k = 0; k < model.width; k++) for (let d = 0; d < model.D; d++) band[k * wide + d] = floats[place.from + k * place.stride + h * model.D + d];
    return band;
  });
  const time = (work) => {
    let [least, out] = [Infinity, null];
    for (let n = 0; n < 5; n++) {
      const from = performance.now();
      out = work();
      least = Math.min(least, performance.now() - from);
    }
    return [least, out];
  };
  const [large, whole] = time(() => model.linear(x, T, place));
  const [small, parts] = time(() => bands.map((band) => model.memory.product(x, T, model.width, band, wide).slice()));
  let most = 0;
  parts.forEach((part, h) => {
    for (let t = 0; t < T; t++) for (let d = 0; d < model.D; d++) most = Math.max(most, Math.abs(part[t * wide + d] - whole[(t * model.H + h) * model.D + d]));
  });
  return { most, large, small };
}

function shapesSaid() {
  const [B, T, d, h] = ["split-B", "split-T", "split-d", "split-h"].map((id) => Number(byId(id).value));
  const whole = [B, T, d, h].every((n) => Number.isInteger(n) && n > 0);
  fill("split-shapes", ...typeset(!whole ? "Give whole numbers above 0." : d % h ? `${d} is not a multiple of ${h}: with d_k = d / h the width cannot be cut evenly.` : `[${B}, ${T}, ${d}] \u2192 [${B}, ${T}, ${h}, ${d / h}] \u2192 [${B}, ${h}, ${T}, ${d / h}]`));
}

section("split", {
  build() {
    byId("split-which").onchange = (event) => {
      split.which = event.target.value;
      drawBands();
    };
    fill("split-steps", ...STEPS.map((name, n) => button(`${n + 1}. ${name}`, () => {
      split.step = n;
      if (current) drawStep(current);
    })));
    for (const id of ["split-B", "split-T", "split-d", "split-h"]) byId(id).oninput = shapesSaid;
    byId("split-both").onclick = () => {
      if (!current) return;
      const { most, large, small } = bothWays(current.plain);
      say("split-timed", `Largest difference ${tiny(most)}. One large product: ${large.toFixed(2)} ms; ${model.H} small ones: ${small.toFixed(2)} ms, on this machine, the best of five.`);
    };
    shapesSaid();
  },
  look(run) {
    drawBands();
    drawStep(run);
  },
});

claim("two-ways", (run) => tiny(bothWays(run).most));
claim("own-slice", () => {
  const place = model.layers[0].q;
  let reached = 0;
  for (let k = 0; k < model.width; k++) if (range(model.D, (n) => model.weight(place, n, k)).some((value) => value !== 0)) reached++;
  return `${reached} of ${model.width}`;
});
