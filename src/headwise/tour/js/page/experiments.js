// Losses of the reader's text under one change, for the claims and some figures. Each leaves the page's state alone.

function forwardOf(run, options = {}, urgency = CLAIM) {
  return calmly(model.pass(run.ids, { ...plainOptions(), ...options }), urgency);
}

const lossesKnown = new Map(); // of the last texts, by what was run

async function lossOf(run, options, urgency) {
  const key = JSON.stringify([run.ids, options]);
  if (!lossesKnown.has(key)) {
    const loss = mean(losses(await forwardOf(run, options, urgency), run.ids, model.vocab));
    if (lossesKnown.size > 200) lossesKnown.clear();
    lossesKnown.set(key, loss);
  }
  return lossesKnown.get(key);
}

// The loss as it is and under a change, as the claims give it.
const lossesSaid = async (run, options) => `${run.loss.toFixed(2)} \u2192 ${(await lossOf(run, options)).toFixed(2)}`;

// Numbers that always come out the same, so that a link shows what its sender saw.
function generator(seed) {
  let a = seed >>> 0;
  return () => {
    a = (a + 0x6d2b79f5) >>> 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

function shuffle(list, seed) {
  const draw = generator(seed);
  const out = [...list];
  for (let i = out.length - 1; i > 0; i--) {
    const j = Math.floor(draw() * (i + 1));
    [out[i], out[j]] = [out[j], out[i]];
  }
  return out;
}

const bos = () => words.ids("")[0] ?? chapter.config.bos_token_id ?? 0;

// The opening token, then random tokens twice: what comes in the second copy can be known from the first alone.
function randomTwice(period, seed = 1) {
  const special = new Set([...words.special.keys(), bos()]);
  const draw = generator(seed);
  const once = [];
  while (once.length < period) {
    const id = Math.floor(draw() * model.vocab);
    if (!special.has(id)) once.push(id);
  }
  return [bos(), ...once, ...once];
}

// Random tokens twice, run with the model as it is and with the reader's changes; a run is kept until the tokens change.
class Laboratory {
  constructor(period) {
    Object.assign(this, { period, ids: randomTwice(period), plain: new Session(model), changed: new Session(model) });
  }

  // The losses of both copies and the layers, or null where a newer run has begun. The first token of the second copy
  // cannot be known, so it is left out.
  async run(options, off, urgency, session = this.changed) {
    const done = await session.run({ ids: this.ids, options, off }, this.plain, urgency);
    if (!done) return null;
    const { each } = done;
    return { ...done, first: mean(each.slice(0, this.period)), second: mean(each.slice(this.period + 1)) };
  }

  untouched(urgency) {
    return this.run(plainOptions(), noneOff(), urgency, this.plain);
  }

  // How much of each query of the second copy lies on the token after its earlier copy: heads by layer.
  induction({ layers }) {
    const { period, ids: { length: T } } = this;
    return layers.map(({ weights }) => range(model.H, (h) => mean(range(period - 1, (n) => {
      const i = period + 2 + n;
      return weights[(h * T + i) * T + i - period + 1];
    }))));
  }

  // The head with the highest mean weight on the token before, and those that find what followed: the circuit's two ends.
  circuit(whole) {
    const T = this.ids.length;
    const before = whole.layers.flatMap(({ weights }, l) => range(model.H, (h) => ({ l, h, value: mean(range(T - 1, (n) => weights[(h * T + n + 1) * T + n])) })));
    const induction = this.induction(whole).flatMap((row, l) => row.map((value, h) => ({ l, h, value }))).filter(({ value }) => value > 0.4);
    const first = before.filter(({ l }) => induction.some((one) => one.l > l)).sort((a, b) => b.value - a.value)[0] ?? null;
    return { first, induction };
  }
}
