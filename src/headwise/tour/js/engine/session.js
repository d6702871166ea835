// A run that is kept, so that a change of a head costs only the layers from that head on; in slices, so that the page
// stays quick, and given up where a newer change comes.

const SLICE = 30; // ms of computing after which the page may draw; a frame costs as much as a layer
const resting = [];
const channel = new MessageChannel();
channel.port1.onmessage = () => resting.shift()?.();
// Lets the page draw and listen; resolves in a new task.
function rest() {
  return new Promise((go) => {
    resting.push(go);
    channel.port2.postMessage(0);
  });
}

// Lets the page show what has changed so far; a hidden page draws nothing, so nothing is waited for.
const shown = () => (document.hidden ? rest() : new Promise((go) => requestAnimationFrame(() => rest().then(go))));

class Session {
  constructor(model) {
    this.model = model;
    this.turn = 0;
    this.steps = []; // of each layer: its key, the residual before it, what its attention showed
  }

  // { ids, options, off } -> { ids, logits, each, loss, layers }, or null where a newer run has begun. `other`: a session
  // whose layers may be taken over where they are the same.
  async run({ ids, options = {}, off = [] }, other = null) {
    const { model } = this;
    const turn = ++this.turn;
    const T = ids.length;
    const keys = [JSON.stringify([ids, options])];
    for (let l = 0; l < model.L; l++) keys.push(`${keys[l]}|${(off[l] ?? []).map(Number).join("")}`);
    if (this.done?.key === keys.at(-1)) return this.done;
    const same = (steps) => steps.slice(0, keys.slice(1).findIndex((key, l) => steps[l]?.key !== key) >>> 0);
    const [own, lent] = [same(this.steps), same(other?.steps ?? [])];
    const kept = own.length >= lent.length ? own : lent;
    const first = kept.length;
    let x = kept.length ? kept.at(-1).after.slice() : model.embedded(ids);
    counts.forwards++;
    let begun = performance.now();
    for (let l = first; l < model.L; l++) {
      const before = x.slice();
      const seen = model.layer(l, x, T, options, off[l], null);
      kept.push({ key: keys[l + 1], before, after: x.slice(), seen });
      if (performance.now() - begun < SLICE) continue;
      await rest();
      if (turn !== this.turn) return null;
      begun = performance.now();
    }
    this.steps = kept;
    const logits = model.logits(x, T);
    const each = losses(logits, ids, model.vocab);
    this.done = { key: keys.at(-1), ids, options, off, logits, each, loss: mean(each), layers: kept.map(({ seen, before }) => ({ ...seen, before })) };
    return this.done;
  }

  // What each head costs: the loss without it, less the loss with all. Calls `tell(layer, head, cost)` as they come.
  async priceAll(done, tell) {
    const { model } = this;
    for (let l = 0; l < model.L; l++) {
      for (let h = 0; h < model.H; h++) {
        const off = done.off.map((row) => [...row]);
        for (let m = 0; m < model.L; m++) off[m] ??= [];
        off[l][h] = true;
        const logits = model.forward(done.ids, done.options, { off, resume: { layer: l, x: done.layers[l].before } });
        tell(l, h, mean(losses(logits, done.ids, model.vocab)) - done.loss);
        await rest();
      }
    }
  }
}
