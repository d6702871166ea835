// Queries, keys and values of the first tokens, where the look carries them; and weights between single tokens.

const vectors = new Map(); // by head: what it computes on the first tokens

async function loadVectors() {
  const { data, calls, groups, weights } = look.vectors;
  if (!data) return;
  const bytes = await inflate(data);
  const byName = new Map(heads.map((head) => [head.name, head]));
  let at = 0;
  const rows = (count, tokens, dims) => {
    const steps = new Float32Array(bytes.slice(at, at + 4 * count * tokens).buffer);
    at += 4 * count * tokens;
    const numbers = new Int8Array(bytes.buffer, at, count * tokens * dims);
    at += count * tokens * dims;
    return (which, token) => {
      const row = which * tokens + token;
      return Array.from(numbers.subarray(row * dims, (row + 1) * dims), (byte) => byte * steps[row]);
    };
  };
  for (const [index, group] of groups) {
    const call = calls[index];
    const query = rows(call.group, call.queries, call.dims);
    const key = rows(1, call.keys, call.dims);
    const value = call.value ? rows(1, call.keys, call.value) : null;
    const size = call.queries * call.keys;
    const start = at;
    if (weights) at += call.group * size;
    for (let member = 0; member < call.group; member++) {
      const head = byName.get(`${call.layer}.${group * call.group + member}`);
      if (!head) continue;
      const from = start + member * size;
      vectors.set(head.index, {
        call,
        query: (i) => query(member, i),
        key: (j) => key(0, j),
        value: value && ((j) => value(0, j)),
        weight: weights ? (i, j) => (bytes[from + i * call.keys + j] / 255) ** 2 : null,
      });
    }
  }
}

// Weights between single tokens: from the map where a cell is a token, else from the first tokens' own.
// `same`: queries and keys are the same tokens.
function tokenWeights(head, from = mapsOf(head)) {
  const whole = head.rows === head.queries && head.columns === head.keys;
  const [queries, keys] = head.sides;
  const same = head.queries === head.keys && queries.axis === keys.axis;
  const name = (side) => (place, limit) => axisName(place, side, limit);
  const names = { same, moved: from === kept.moved, queryName: name(queries), keyName: name(keys), queryText: (place) => axisText(place, queries) };
  if (whole && head.rows) return { ...names, queries: head.rows, keys: head.columns, weight: (i, j) => weightAt(head, i, j, from) };
  const inner = vectors.get(head.index);
  if (!inner?.weight || from === kept.moved) return null;
  return { ...names, queries: inner.call.queries, keys: inner.call.keys, weight: inner.weight };
}

function whyNoTokens() {
  return "In this report a cell of the map stands for several tokens. For single ones, look at a text of at most 128 tokens.";
}
