// Weights, or what they move, and their colours. A code is levels - 1 times the square root of the number.

const kept = { weight: { levels: look.maps.levels, codes: null }, moved: { levels: look.moved.levels, codes: null } }; // codes: all maps, one after the other
const starts = [];

async function loadMaps() {
  const lacking = new Set(look.moved.lacking);
  kept.weight.codes = await inflate(look.maps.data);
  if (look.moved.data) kept.moved.codes = await inflate(look.moved.data);
  let start = 0;
  for (const head of heads) {
    starts.push(start);
    start += head.rows * head.columns;
    head.causal = isCausal(head);
    head.moves = kept.moved.codes !== null && !lacking.has(head.index);
  }
}

// The maps that are shown of a head.
function mapsOf(head) {
  return state.weigh === "moved" && head.moves ? kept.moved : kept.weight;
}

function codeAt(head, row, column, { codes } = mapsOf(head)) {
  return codes[starts[head.index] + row * head.columns + column];
}

function weightAt(head, row, column, from = mapsOf(head)) {
  return (codeAt(head, row, column, from) / (from.levels - 1)) ** 2;
}

// Half a step of the coding at that weight: how far off the number shown may be.
function errorAt(weight, { levels }) {
  return Math.sqrt(weight) / (levels - 1);
}

// May no query attend a later key? Then that triangle is left bare, so that the shape is seen.
function isCausal(head) {
  if (head.rows !== head.columns || head.rows < 2 || head.ahead.length) return false;
  for (let i = 0; i < head.rows; i++) {
    for (let j = i + 1; j < head.columns; j++) if (codeAt(head, i, j)) return false;
  }
  return true;
}

// Position on the colour scale, 0 to 1, of each code in a row.
function shadeOf(code, rowLargest, levels) {
  const root = code / (levels - 1);
  if (state.shade === "plain") return root * root;
  if (state.shade === "row") return rowLargest ? (code / rowLargest) ** 2 : 0;
  return root;
}

function largestCode(head, row) {
  const from = starts[head.index] + row * head.columns;
  return mapsOf(head).codes.subarray(from, from + head.columns).reduce((a, b) => Math.max(a, b), 0);
}

// Draws a head's map, one pixel a cell; where that is more than `side` pixels, the highest of several cells, so that
// thin lines stay seen.
function drawMap(canvas, head, side = Infinity) {
  const pool = Math.ceil(Math.max(head.rows, head.columns) / side) || 1;
  const rows = Math.ceil(head.rows / pool);
  const columns = Math.ceil(head.columns / pool);
  canvas.width = Math.max(columns, 1);
  canvas.height = Math.max(rows, 1);
  if (!rows || !columns) return;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const { levels } = mapsOf(head);
  for (let i = 0; i < head.rows; i++) {
    const largest = state.shade === "row" ? largestCode(head, i) : 0;
    const y = Math.floor(i / pool);
    for (let j = 0; j < head.columns; j++) {
      if (head.causal && j > i) break;
      const at = 4 * (y * columns + Math.floor(j / pool));
      paint(image.data, at, Math.round(255 * shadeOf(codeAt(head, i, j), largest, levels)));
    }
  }
  context.putImageData(image, 0, 0);
}

function ramp() {
  const canvas = el("canvas", { width: 256, height: 1 });
  const image = canvas.getContext("2d").createImageData(256, 1);
  for (let i = 0; i < 256; i++) {
    image.data.set(RAMP.subarray(3 * i, 3 * i + 3), 4 * i);
    image.data[4 * i + 3] = 255;
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function legend(node) {
  const width = 150;
  const root = state.shade === "root";
  const place = d3.scaleLinear([0, 1], [0, width]);
  const ticks = root ? [0, 0.05, 0.25, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const axis = d3.axisBottom(place).tickValues(ticks.map((w) => (root ? Math.sqrt(w) : w)));
  axis.tickFormat((_, i) => String(ticks[i])).tickSize(4).tickPadding(2);
  const svg = drawing(width + 20, 20);
  svg.append("g").attr("transform", "translate(10,0)").call(axis);
  node.replaceChildren(el("span", {}, state.shade === "row" ? "of the largest" : state.weigh === "moved" ? "moved" : "weight"), el("div", {}, ramp(), svg.node()));
}
