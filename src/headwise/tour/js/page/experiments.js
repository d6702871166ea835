// Losses of the reader's text under one change, for the claims. Each leaves the page's state alone.

function forwardOf(run, options = {}, more = {}) {
  return model.forward(run.ids, { ...plainOptions(), ...options }, more);
}

const lossOf = (run, options, more) => mean(losses(forwardOf(run, options, more), run.ids, model.vocab));

function offAll(list) {
  const off = noneOff();
  for (const [l, h] of list) off[l][h] = true;
  return off;
}

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

// Losses of the first and the second copy; the first token of the second copy cannot be known, so it is left out.
function copyLosses(ids, period, options, off) {
  const each = losses(model.forward(ids, { ...plainOptions(), ...options }, { off }), ids, model.vocab);
  return { each, first: mean(each.slice(0, period)), second: mean(each.slice(period + 1)) };
}

// How much of each query of the second copy lies on the token after its earlier copy: heads by layer.
function inductionScores(ids, period, off) {
  const x = model.embedded(ids);
  const T = ids.length;
  return Array.from({ length: model.L }, (_, l) => {
    const { weights } = model.layer(l, x, T, plainOptions(), off[l], null);
    return Array.from({ length: model.H }, (_, h) => mean(Array.from({ length: period - 1 }, (_, n) => {
      const i = period + 2 + n;
      return weights[(h * T + i) * T + i - period + 1];
    })));
  });
}

// The head with the highest mean weight on the token before, and those that find what followed: the circuit's two ends.
function circuitHeads(ids, period) {
  const T = ids.length;
  const x = model.embedded(ids);
  const before = [];
  for (let l = 0; l < model.L; l++) {
    const { weights } = model.layer(l, x, T, plainOptions(), null, null);
    for (let h = 0; h < model.H; h++) before.push({ l, h, value: mean(Array.from({ length: T - 1 }, (_, n) => weights[(h * T + n + 1) * T + n])) });
  }
  const induction = inductionScores(ids, period, noneOff()).flatMap((row, l) => row.map((value, h) => ({ l, h, value }))).filter(({ value }) => value > 0.4);
  const first = before.filter(({ l }) => induction.some((one) => one.l > l)).sort((a, b) => b.value - a.value)[0] ?? null;
  return { first, induction };
}
