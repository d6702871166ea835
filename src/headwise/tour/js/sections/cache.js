// 10. One token at a time, with a cache; and cross-attention, where queries and keys come from two texts.

const FIRST_STEPS = 16; // tokens that are in the cache when the reader comes
const DTYPE = 2; // bytes a number in a cache, as most models keep it
const stepper = { key: "", cache: null, at: 0, gap: 0, made: [] };

const cacheBytes = (kv) => model.L * 2 * kv * model.D * DTYPE;

const stepKey = () => (current ? JSON.stringify([current.ids, state.kv]) : "");

function restartSteps() {
  Object.assign(stepper, { key: stepKey(), cache: model.newCache(LONGEST + 1, state.kv), at: 0, gap: 0, made: [] });
}

// Runs the next token through the model, its keys and values into the cache; gives its logits.
function stepOnce() {
  const ids = current.ids;
  const known = stepper.at < ids.length;
  const id = known ? ids[stepper.at] : stepper.made[stepper.at - ids.length];
  const logits = model.forward([id], { ...plainOptions(), kv: state.kv }, { cache: stepper.cache });
  stepper.at++;
  if (known && state.kv === model.K) {
    const from = (stepper.at - 1) * model.vocab;
    stepper.gap = Math.max(stepper.gap, largestDifference(logits, current.plain.logits.subarray(from, from + model.vocab)));
  }
  if (stepper.at >= ids.length) stepper.made.push(likeliest(logits, 0, model.vocab, 1)[0].id);
}

section("cache", {
  build() {
    restartSteps();
    otherText.key = "";
    this.shown = false;
    byId("step").onclick = () => this.step(1);
    byId("step-text").onclick = () => this.step(LONGEST, true);
    byId("step-again").onclick = () => {
      restartSteps();
      if (current) this.draw(current);
    };
    byId("cross-text").value = "with open(path) as file:\n    return file.read()";
    byId("cross-text").oninput = () => current && this.cross(current);
  },
  // So many tokens; `known`: no further than the text goes.
  async step(count, known = false) {
    if (!current) return;
    if (stepper.key !== stepKey()) restartSteps();
    const key = stepper.key;
    for (let n = 0; n < count && stepper.key === key && stepper.at < (known ? current.ids.length : Math.min(LONGEST, model.positions)); n++) {
      stepOnce();
      if (n % 4 === 3) {
        this.steps();
        await later(FIGURE);
      }
    }
    this.steps();
  },
  draw(run) {
    if (stepper.key !== stepKey()) restartSteps();
    for (; !this.shown && stepper.at < Math.min(FIRST_STEPS, run.ids.length); ) stepOnce();
    this.shown = true;
    this.steps();
    this.cross(run);
  },
  look(run) {
    this.cross(run);
  },
  steps() {
    const { at, made } = stepper;
    const T = current.ids.length;
    say("step-said", at === 0 ? "The cache is empty. Press Step: the first token is read, and its keys and values are kept." : `${plural(at, "token")} read, each computed once; without a cache the model would have computed ${thousands((at * (at + 1)) / 2)}. In the cache: ${thousands(at * cacheBytes(state.kv))} bytes, ${thousands(cacheBytes(state.kv))} a token.${state.kv === model.K ? ` Largest difference of logits to one pass over the whole text: ${tiny(stepper.gap)}.` : ""}`);
    const svg = picture(640, 8 + 22 * model.L, `The cache: ${at} tokens in ${model.L} layers`);
    const wide = 576 / Math.max(T + 8, at + 1);
    for (let l = 0; l < model.L; l++) {
      put(svg, "text", { x: 0, y: 14 + 22 * l }).text(`layer ${l}`);
      for (let t = 0; t < at; t++) for (const [n, part] of ["k", "v"].entries()) put(svg, "rect", { class: t === at - 1 ? "new" : part, x: 60 + t * wide, y: 3 + 22 * l + 9 * n, width: Math.max(wide - 0.5, 0.4), height: 8 });
    }
    fill("cache-drawing", svg.node());
    const out = byId("made");
    out.replaceChildren();
    if (made.length) {
      out.append("The model goes on: ");
      for (const id of made) {
        const node = el("span", { className: "token" });
        appendText(node, words.piece(id).text);
        out.append(node);
      }
    }
  },
  cross(run) {
    const other = words.ids(byId("cross-text").value).slice(0, 64);
    if (!other.length) return;
    const { T, S, weights } = crossMap(run.plain, other);
    drawMap(byId("cross-map"), weights, state.head * T * S, T, S, false);
    say("cross-said", `Head ${nameOfHead(state.layer, state.head)}: ${T} queries of the text above, ${S} keys of the other. Each row still sums to 1. This model was not trained for it: only the shape of the map means something.`);
  },
});

// The residual of the other text before a layer; what has been computed is kept.
const otherText = { key: "", before: [] };
function otherBefore(other, layer) {
  if (otherText.key !== other.join()) Object.assign(otherText, { key: other.join(), before: [model.embedded(other)] });
  for (let l = otherText.before.length - 1; l < layer; l++) {
    const x = otherText.before[l].slice();
    model.layer(l, x, other.length, plainOptions(), null, null);
    otherText.before.push(x);
  }
  return otherText.before[layer];
}

// Queries of one run, keys of another text, at the layer looked at; no mask, for neither text is the other's future.
function crossMap(run, other) {
  const [T, S] = [run.ids.length, other.length];
  const x = otherBefore(other, state.layer);
  const { norm1 } = model.layers[state.layer];
  const { k, K } = model.project(state.layer, rmsNorm(x, S, model.width, norm1, model.eps), S, { ...plainOptions(), rotary: false });
  const { q } = model.project(state.layer, rmsNorm(run.layers[state.layer].before, T, model.width, norm1, model.eps), T, { ...plainOptions(), rotary: false });
  return { T, S, weights: model.weigh(q, k, T, S, K, { causal: false }) };
}

claim("kv-cache", () => thousands(cacheBytes(model.K)));
claim("same-steps", async (run) => {
  const cache = model.newCache(LONGEST);
  let most = 0;
  for (let t = 0; t < run.ids.length; t++) {
    most = Math.max(most, largestDifference(model.forward([run.ids[t]], plainOptions(), { cache }), run.logits.subarray(t * model.vocab, (t + 1) * model.vocab)));
    if (t % 4 === 3) await later(CLAIM);
  }
  return tiny(most);
});
claim("cross", (run) => {
  const { T, S } = crossMap(run, words.ids(byId("cross-text").value).slice(0, 64));
  return `${T} \u00d7 ${S}`;
});
