// The large map: canvas for the cells, D3 axes with the tokens, a cross that follows pointer and arrow keys.

const large = { zoom: 0, cell: 6, cursor: null, canvas: null, cross: null };
const MARGIN = { left: 90, top: 70 };
const EDGE = 6; // the first label is wider than its cell, so an axis begins this much before the plot

function buildMap() {
  const view = byId("map");
  view.addEventListener("pointermove", (event) => {
    const cell = cellUnder(event);
    if (cell) pointAt(...cell);
  });
  view.addEventListener("pointerleave", () => pointAt(state.query, state.key));
  view.addEventListener("click", (event) => {
    const cell = cellUnder(event);
    if (!cell) return;
    selectQuery(...cell);
    pointAt(...cell); // a finger does not hover
  });
  view.addEventListener("keydown", moveInMap);
  view.addEventListener("focus", () => {
    if (!large.cursor || large.cursor[1] === null) pointAt(state.query, strongestKey(heads[state.head], state.query));
  });
  byId("larger").addEventListener("click", () => zoom(large.cell * 1.5));
  byId("smaller").addEventListener("click", () => zoom(large.cell / 1.5));
  byId("fit").addEventListener("click", () => zoom(0));
}

function zoom(cell) {
  large.zoom = cell ? Math.min(Math.max(cell, 2), 48) : 0;
  drawLarge(heads[state.head]);
}

function strongestKey(head, row) {
  let best = 0;
  for (let j = 1; j < head.columns; j++) if (codeAt(head, row, j) > codeAt(head, row, best)) best = j;
  return best;
}

// Every k-th label, so that neighbours do not touch.
const labelStep = (cell) => Math.max(1, Math.ceil(11 / cell));
function labelled(size, cell) {
  const every = labelStep(cell);
  return Array.from({ length: size }, (_, i) => i).filter((i) => i % every === 0);
}

// As wide as the longest label; 6.1 is the width of a letter of the axes' font.
function setMargins(head) {
  const longest = (side, limit) => Math.max(4, ...d3range(side.size).map((i) => cellLabel(i, side, limit).length));
  MARGIN.left = Math.max(58, 6.1 * longest(head.sides[0], 13) + 14);
  MARGIN.top = Math.max(44, 6.1 * longest(head.sides[1], 11) + 14);
}

function drawLarge(head) {
  const view = byId("map");
  setMargins(head);
  const room = Math.max(view.clientWidth - MARGIN.left - 4, 120);
  const fit = Math.min(room / head.columns, Math.max(window.innerHeight * 0.68, 320) / head.rows, 26);
  const cell = (large.cell = large.zoom || Math.max(fit, 2));
  const [width, height] = [cell * head.columns, cell * head.rows];
  large.canvas = el("canvas", { className: "cells" });
  drawMap(large.canvas, head);
  large.canvas.style.width = `${width}px`;
  large.canvas.style.height = `${height}px`;
  const cross = drawing(width, height).attr("class", "cross");
  for (const part of ["row", "column", "cell"]) cross.append("rect").attr("class", part);
  large.cross = cross;
  const plot = el("div", { className: "plot" }, large.canvas, cross.node());
  const grid = el("div", { className: "map-grid" }, cornerOf(), keyAxis(head, width, cell), queryAxis(head, height, cell), plot);
  view.replaceChildren(grid);
  byId("labelled").textContent = labelStep(cell) > 1 ? `The axes have room for 1 label in ${labelStep(cell)}; point at a cell to read its own.` : "";
  if (head.rows) pointAt(Math.min(state.query, head.rows - 1), state.key);
}

function cornerOf() {
  const svg = drawing(MARGIN.left - EDGE, MARGIN.top - EDGE).attr("class", "corner");
  svg.append("text").attr("class", "name").attr("x", MARGIN.left - 10).attr("y", MARGIN.top - 26).attr("text-anchor", "end").text("key \u2192");
  svg.append("text").attr("class", "name").attr("x", MARGIN.left - 10).attr("y", MARGIN.top - 10).attr("text-anchor", "end").text("query \u2193");
  return svg.node();
}

function keyAxis(head, width, cell) {
  const band = d3.scaleBand(d3range(head.columns), [0, width]);
  const axis = d3.axisTop(band).tickValues(labelled(head.columns, cell)).tickSize(3).tickPadding(3);
  axis.tickFormat((i) => cellLabel(i, head.sides[1], 11));
  const svg = drawing(width + EDGE, MARGIN.top).attr("class", "keys");
  const group = svg.append("g").attr("transform", `translate(${EDGE},${MARGIN.top})`).call(axis);
  group.selectAll("text").attr("transform", "rotate(-90)").attr("text-anchor", "start").attr("x", 7).attr("y", 0).attr("dy", "0.32em");
  return svg.node();
}

function queryAxis(head, height, cell) {
  const band = d3.scaleBand(d3range(head.rows), [0, height]);
  const axis = d3.axisLeft(band).tickValues(labelled(head.rows, cell)).tickSize(3).tickPadding(4);
  axis.tickFormat((i) => cellLabel(i, head.sides[0], 13));
  const svg = drawing(MARGIN.left, height + EDGE).attr("class", "queries");
  svg.append("g").attr("transform", `translate(${MARGIN.left},${EDGE})`).call(axis);
  return svg.node();
}

function d3range(size) {
  return Array.from({ length: size }, (_, i) => i);
}

function cellUnder(event) {
  const head = heads[state.head];
  const box = large.canvas.getBoundingClientRect();
  const row = Math.floor(((event.clientY - box.top) / box.height) * head.rows);
  const column = Math.floor(((event.clientX - box.left) / box.width) * head.columns);
  if (row < 0 || column < 0 || row >= head.rows || column >= head.columns) return null;
  return [row, column];
}

// Puts the cross on a cell, or on a whole query row (column null), and says what is there.
function pointAt(row, column) {
  const head = heads[state.head];
  const cell = large.cell;
  large.cursor = [row, column];
  const [width, height] = [cell * head.columns, cell * head.rows];
  place("row", 0, row * cell, width, cell);
  place("column", column === null ? -9 : column * cell, 0, column === null ? 0 : cell, height);
  place("cell", column === null ? -9 : column * cell, row * cell, column === null ? 0 : cell, cell);
  byId("readout").replaceChildren(...sentence(head, row, column));
  emit("preview", column === null ? null : row);
}

function place(part, x, y, width, height) {
  large.cross.select(`.${part}`).attr("x", x).attr("y", y).attr("width", width).attr("height", height);
}

function sentence(head, row, column) {
  if (!head.rows || !head.columns) return ["This call had no tokens."];
  const key = column ?? strongestKey(head, row);
  const weight = weightAt(head, row, key);
  const error = errorAt(weight, mapsOf(head));
  const shown = head.causal && key > row ? "not allowed" : number(weight, 3) + (error > 0.0045 ? ` \u00b1 ${number(error, 2)}` : "");
  const lead = column === null ? "strongest key " : "key ";
  return [
    "query ", el("bdi", {}, cellSentence(row, head.sides[0])), ` \u00b7 ${lead}`,
    el("bdi", {}, cellSentence(key, head.sides[1])), ` \u00b7 ${mapsOf(head) === kept.moved ? "share of what it moves" : "weight"} `, el("b", {}, shown),
  ];
}

function moveInMap(event) {
  const head = heads[state.head];
  const [row, column] = [large.cursor[0], large.cursor[1] ?? strongestKey(head, large.cursor[0])];
  const far = event.shiftKey ? 8 : 1;
  const moves = {
    ArrowUp: [row - far, column],
    ArrowDown: [row + far, column],
    ArrowLeft: [row, column - far],
    ArrowRight: [row, column + far],
    Home: [row, 0],
    End: [row, head.columns - 1],
  };
  if (event.key === "Enter") {
    selectQuery(row, column);
    pointAt(row, column);
  }
  const move = moves[event.key];
  if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
  pointAt(clamp(move[0], head.rows), clamp(move[1], head.columns));
}
