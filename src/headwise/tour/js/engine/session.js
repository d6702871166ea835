// What is computed when; and a run that is kept, so that a change of a head costs only the layers from that head on; in
// slices, so that the page stays quick, and given up where a newer change comes.

const SLICE = 30; // ms of computing after which the page may draw; a frame costs as much as a layer
const [CHANGE, FIGURE, CLAIM] = [0, 1, 2]; // urgency: a change of the reader's, what the reader looks at, all else
const busy = [0, 0, 0]; // how much of each is under way
const waiting = [];
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

// As `rest`, and waits until nothing more urgent is under way.
async function later(urgency) {
  await rest();
  while (busy.some((count, level) => count && level < urgency)) await new Promise((go) => waiting.push(go));
}

// Work of this urgency: until it ends, what is less urgent stands still where it says `later`; so in it nothing less urgent
// may be waited for.
async function work(urgency, act) {
  busy[urgency]++;
  try {
    return await act();
  } finally {
    busy[urgency]--;
    for (const go of waiting.splice(0)) go();
  }
}

// The logits of a pass; after each layer, more urgent work comes first.
async function calmly(pass, urgency) {
  for (;;) {
    const { done, value } = pass.next();
    if (done) return value;
    await later(urgency);
  }
}

// Lets the page show what has changed so far; a hidden page draws nothing, so nothing is waited for.
const shown = () => (document.hidden ? rest() : new Promise((go) => requestAnimationFrame(() => rest().then(go))));

class Session {
  constructor(model) {
    this.model = model;
    this.turn = 0;
    this.steps = []; // of each layer: the keys before and behind it, the residual before it, what its attention showed
  }

  // { ids, options, off } -> { ids, logits, each, loss, layers }, or null where a newer run has begun. `other`: a session
  // whose layers may be taken over where they are the same.
  async run({ ids, options = {}, off = [] }, other = null, urgency = CHANGE) {
    const { model } = this;
    const turn = ++this.turn;
    const keys = [JSON.stringify([ids, options])];
    for (let l = 0; l < model.L; l++) keys.push(`${keys[l]}|${(off[l] ?? []).map(Number).join("")}`);
    if (this.done?.key === keys.at(-1)) return this.done;
    const same = (steps) => steps.slice(0, keys.slice(1).findIndex((key, l) => steps[l]?.key !== key) >>> 0);
    const [own, lent] = [same(this.steps), same(other?.steps ?? [])];
    const kept = own.length >= lent.length ? own : lent;
    const first = kept.length;
    // The first layer that changes has other heads off, and perhaps nothing else: its heads see the same.
    const known = [this, other].map((session) => session?.steps[first]).find((step) => step?.from === keys[first])?.seen;
    let before = kept.at(-1)?.after ?? model.embedded(ids);
    const pass = model.pass(ids, options, { off, resume: { layer: first, x: before, seen: known } });
    let [step, begun] = [null, performance.now()];
    while (!(step = pass.next()).done) {
      const [l, after] = [kept.length, step.value.x.slice()];
      kept.push({ key: keys[l + 1], from: keys[l], before, after, seen: step.value.seen });
      before = after;
      if (performance.now() - begun < SLICE) continue;
      await later(urgency);
      if (turn !== this.turn) return null;
      begun = performance.now();
    }
    this.steps = kept;
    const logits = step.value;
    const each = losses(logits, ids, model.vocab);
    this.done = { key: keys.at(-1), ids, options, off, logits, each, loss: mean(each), layers: kept.map(({ seen, before }) => ({ ...seen, before })) };
    return this.done;
  }

  // What each head costs: the loss without it, less the loss with all. Calls `tell(layer, head, cost)` as they come.
  async priceAll(done, tell, urgency) {
    const { model } = this;
    for (let l = 0; l < model.L; l++) {
      for (let h = 0; h < model.H; h++) {
        const off = done.off.map((row) => [...row]);
        for (let m = 0; m < model.L; m++) off[m] ??= [];
        off[l][h] = true;
        const resume = { layer: l, x: done.layers[l].before, seen: done.layers[l] };
        const logits = await calmly(model.pass(done.ids, done.options, { off, resume }), urgency);
        tell(l, h, mean(losses(logits, done.ids, model.vocab)) - done.loss);
        await later(urgency);
      }
    }
  }
}
