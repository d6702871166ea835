// Attention maps: a pixel a cell, colour by the square root of the weight; cells that may not be attended stay bare.

// The ramp's colours, a whole pixel each.
const PIXELS = new Uint32Array(Uint8ClampedArray.from({ length: 1024 }, (_, n) => (n % 4 === 3 ? 255 : RAMP[3 * (n >> 2) + (n % 4)])).buffer);

function drawMap(canvas, weights, from, T, S, causal) {
  canvas.width = S;
  canvas.height = T;
  const context = canvas.getContext("2d");
  const image = context.createImageData(S, T);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < T; i++) {
    const end = causal ? i + 1 + S - T : S;
    for (let j = 0, at = i * S; j < end; j++, at++) pixels[at] = PIXELS[Math.round(255 * Math.sqrt(weights[from + at]))];
  }
  context.putImageData(image, 0, 0);
}

function drawHead(canvas, run, layer, head) {
  const T = run.ids.length;
  drawMap(canvas, run.layers[layer].weights, head * T * T, T, T, state.causal);
}

const weightOf = (run, layer, head, i, j) => run.layers[layer].weights[(head * run.ids.length + i) * run.ids.length + j];

// The delimiters of `headwise look`: a mark or a line end, after spaces at most. A line end with indentation is none.
const isDelimiter = (text) => /^ *[.,;:!?\n]$/u.test(text);

// For each role the cells where an ideal head would look on these ids: cells[i] is a list of keys j.
function idealCells(role, ids, pieces) {
  const before = new Map(); // token -> places so far
  const marks = pieces.map(({ text }, j) => j > 0 && isDelimiter(text));
  const firstMark = marks.indexOf(true);
  return ids.map((id, i) => {
    const copies = before.get(id) ?? [];
    before.set(id, [...copies, i]);
    switch (role) {
      case "previous-token": return i > 0 ? [i - 1] : [];
      case "self": return i > 0 ? [i] : []; // the first query has no choice
      case "first-token sink": return i > 0 ? [0] : [];
      case "duplicate-token": return copies;
      case "induction": return copies.map((j) => j + 1).filter((j) => j < i);
      default: return firstMark < 0 || i < firstMark ? [] : marks.flatMap((mark, j) => (mark && j <= i ? [j] : []));
    }
  });
}

// The mean mass of each head on the ideal cells, over queries that have one; and what uniform attention gives.
function roleScores(run, cells) {
  const T = run.ids.length;
  const queries = cells.flatMap((keys, i) => (keys.length ? [i] : []));
  const chance = mean(queries.map((i) => cells[i].length / (i + 1)));
  const values = run.layers.map(({ weights }) => range(weights.length / (T * T), (h) => {
    let total = 0;
    for (const i of queries) {
      let sum = 0;
      for (const j of cells[i]) sum += weights[(h * T + i) * T + j];
      total += sum;
    }
    return total / Math.max(queries.length, 1);
  }));
  return { values, chance, queries: queries.length };
}

const playsRole = (role, value, chance) => value > role.threshold && value > 2 * chance;

// The roles that each head plays on this text: plays[layer][head] = [{ role, value }].
function rolesPlayed(run, pieces) {
  const plays = run.layers.map(() => range(model.H, () => []));
  for (const role of chapter.roles) {
    const { values, chance, queries } = roleScores(run, idealCells(role.name, run.ids, pieces));
    if (!queries) continue;
    values.forEach((row, l) => row.forEach((value, h) => playsRole(role, value, chance) && plays[l][h].push({ role, value })));
  }
  return plays;
}

// A grid of all heads, a row a layer: a button each. `make(button, layer, head)` fills one; `press(layer, head)` is what a click does.
function headGrid(box, label, { press, make }) {
  box.setAttribute("role", "grid");
  box.style.setProperty("--heads", model.H);
  const rows = range(model.L, (l) => el("div", { className: "row", role: "row" }, el("span", { className: "row-name", role: "rowheader" }, `layer ${l}`), ...range(model.H, (h) => {
    const cell = el("button", { type: "button", className: "head", "data-item": nameOfHead(l, h) });
    make(cell, l, h);
    cell.addEventListener("click", () => {
      lookAt({ layer: l, head: h });
      press?.(l, h);
    });
    return el("span", { role: "gridcell" }, cell);
  })));
  box.replaceChildren(...rows);
  rove(box, () => model.H, { label, pick: (node) => {
    const [layer, head] = placeOf(node.dataset.item);
    lookAt({ layer, head });
  } });
}

function markHead(box) {
  const chosen = box.querySelector(`[data-item="${nameOfHead(state.layer, state.head)}"]`);
  for (const item of box.querySelectorAll("[data-item]")) item.toggleAttribute("aria-current", item === chosen);
  settle(box, chosen);
}
