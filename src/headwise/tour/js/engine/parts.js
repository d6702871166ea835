// The parts of a layer that are no product: norm, rotary positions, softmax.

const counts = { layers: 0, attentions: 0, forwards: 0, draws: {} }; // what has been computed and drawn; the tests read it

function rmsNorm(x, T, D, weight, eps) {
  const y = new Float32Array(T * D);
  for (let t = 0; t < T; t++) {
    let sum = 0;
    for (let d = 0; d < D; d++) sum += x[t * D + d] ** 2;
    const scale = 1 / Math.sqrt(sum / D + eps);
    for (let d = 0; d < D; d++) y[t * D + d] = x[t * D + d] * scale * weight[d];
  }
  return y;
}

// Cosine and sine of every position and every pair of dimensions.
function makeTurns(length, D, theta) {
  const turns = new Float64Array(length * D);
  for (let t = 0, at = 0; t < length; t++) {
    for (let d = 0; d < D / 2; d++) {
      const angle = t * theta ** ((-2 * d) / D);
      turns[at++] = Math.cos(angle);
      turns[at++] = Math.sin(angle);
    }
  }
  return turns;
}

// Turns heads of D dimensions, side by side, in place: the first half of each together with its second half.
function rotate(x, T, heads, D, turns, from = 0) {
  const half = D / 2;
  for (let t = 0; t < T; t++) {
    for (let d = 0; d < half; d++) {
      const turn = 2 * ((t + from) * half + d);
      const [c, s] = [turns[turn], turns[turn + 1]];
      for (let h = 0; h < heads; h++) {
        const at = (t * heads + h) * D + d;
        const [a, b] = [x[at], x[at + half]];
        x[at] = a * c - b * s;
        x[at + half] = b * c + a * s;
      }
    }
  }
}

// The softmax of the first `end` scores of a row, into p.
function softmaxRow(s, from, end, p, to) {
  let [most, sum] = [-Infinity, 0];
  for (let j = 0; j < end; j++) if (s[from + j] > most) most = s[from + j];
  for (let j = 0; j < end; j++) sum += p[to + j] = Math.exp(s[from + j] - most);
  for (let j = 0; j < end; j++) p[to + j] /= sum;
}

// Cross-entropy of each next token, in nats.
function losses(logits, ids, vocab) {
  return ids.slice(1).map((target, t) => {
    const from = t * vocab;
    let [most, sum] = [-Infinity, 0];
    for (let i = 0; i < vocab; i++) if (logits[from + i] > most) most = logits[from + i];
    for (let i = 0; i < vocab; i++) sum += Math.exp(logits[from + i] - most);
    return most + Math.log(sum) - logits[from + target];
  });
}

const sumOf = (numbers) => numbers.reduce((a, b) => a + b, 0);
const mean = (numbers) => sumOf(numbers) / Math.max(numbers.length, 1);

// The probabilities of one row of logits, and the places of its `count` highest.
function likeliest(logits, row, vocab, count) {
  const last = logits.subarray(row * vocab, (row + 1) * vocab);
  const order = [...last.keys()].sort((a, b) => last[b] - last[a]).slice(0, count);
  const sum = last.reduce((total, value) => total + Math.exp(value - last[order[0]]), 0);
  return order.map((id) => ({ id, chance: Math.exp(last[id] - last[order[0]]) / sum }));
}
