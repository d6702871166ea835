// Heads that read what earlier heads write. Strings are hostile: they reach the document as text nodes alone.

const data = JSON.parse(byId("look").textContent);
const KINDS = { q: "queries", k: "keys", v: "values" };
const ROW = [78, 130]; // pixels from layer to layer: at least, and in a graph that is lower than the window
const BOX = [58, 22];
const APART = 72; // pixels between the heads of a layer, at least
const LEFT = 30; // for the numbers of the layers
const drawnKinds = new Set(Object.keys(KINDS));
const place = (i) => `${data.heads[i].layer}.${data.heads[i].head}`;
let most = Math.min(data.most, 8);
let chosen = null; // the number of a head
let current = null; // the head that the Tab key reaches
let nodes = new Map();

function svg(tag, properties = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function roleOf(i) {
  const { role } = data.heads[i];
  return role === null ? null : data.roles[role];
}

function said(i) {
  const role = roleOf(i);
  return role ? `${place(i)} ${plainText(role.label, 40)}` : place(i);
}

function tinted(node, i) {
  const role = roleOf(i);
  if (role && !role.mark) {
    node.style.setProperty("--role", `var(--role-${role.colour})`);
    node.style.setProperty("--on", `var(--on-${role.colour})`);
  }
  return node;
}

// The strongest of each kind that is drawn; edges come strongest first.
function shownEdges() {
  const count = { q: 0, k: 0, v: 0 };
  return data.edges.filter(({ kind }) => drawnKinds.has(kind) && (count[kind] += 1) <= most);
}

const times = (edge) => `${number(edge.times, 1)}\u00d7`;

// A row a layer. A head stands where its column is in a matrix of heads, moved as far as the heads of its layer need.
function placesOf(edges, width) {
  const used = [...new Set(edges.flatMap(({ reader, writer }) => [writer, reader]))].sort((a, b) => a - b);
  const layers = [...new Set(used.map((i) => data.heads[i].layer))].sort((a, b) => a - b);
  const rows = layers.map((layer) => used.filter((i) => data.heads[i].layer === layer));
  const room = Math.max(width - LEFT, ...rows.map((row) => APART * row.length));
  const places = new Map();
  const step = Math.min(Math.max((0.7 * window.innerHeight) / Math.max(rows.length - 1, 1), ROW[0]), ROW[1]);
  rows.forEach((row, n) => {
    const xs = row.map((i) => ((data.heads[i].head + 0.5) / data.width) * room);
    xs[0] = Math.max(xs[0], APART / 2);
    for (let k = 1; k < xs.length; k++) xs[k] = Math.max(xs[k], xs[k - 1] + APART);
    xs[xs.length - 1] = Math.min(xs.at(-1), room - APART / 2);
    for (let k = xs.length - 2; k >= 0; k--) xs[k] = Math.min(xs[k], xs[k + 1] - APART);
    row.forEach((i, k) => places.set(i, { x: LEFT + xs[k], y: 26 + step * n, row: n }));
  });
  return { places, rows, layers, step, size: [LEFT + room, 26 + step * Math.max(rows.length - 1, 0) + 34] };
}

// A curve from the writer down to the reader; lines of different kinds, and those past other layers, bend apart.
function curve({ kind, writer, reader }, places) {
  const [from, to] = [places.get(writer), places.get(reader)];
  const steps = to.row - from.row;
  const aside = { q: -1, k: 0, v: 1 }[kind] * 14;
  const past = steps > 1 && Math.abs(to.x - from.x) < APART ? (to.x > LEFT + 2 * APART ? -1 : 1) * Math.min(22 + 9 * steps, 90) : 0;
  const [y1, y2] = [from.y + BOX[1] / 2, to.y - BOX[1] / 2 - 6];
  const pull = 0.42 * (y2 - y1);
  return [[from.x + aside / 2, y1], [from.x + aside + past, y1 + pull], [to.x + aside + past, y2 - pull], [to.x + aside / 2, y2]];
}

function at(points, t) {
  const weights = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t ** 2 * (1 - t), t ** 3];
  return [0, 1].map((axis) => points.reduce((sum, point, n) => sum + weights[n] * point[axis], 0));
}

// The first place along the curve where a label hides no other and no head.
function labelAt(points, half, taken) {
  const free = ([x, y]) => taken.every(([a, b, w]) => Math.abs(a - x) > half + w || Math.abs(b - y) > 15);
  const candidates = [0.5, 0.42, 0.58, 0.34, 0.66, 0.27, 0.73, 0.2, 0.8, 0.14, 0.86].map((t) => at(points, t));
  const place = candidates.find(free) ?? candidates[0];
  taken.push([...place, half]);
  return place;
}

function drawGraph() {
  const edges = shownEdges();
  const { places, rows, layers, step, size } = placesOf(edges, byId("place").clientWidth);
  const root = svg("svg", { width: size[0], height: size[1], role: "group" });
  root.setAttribute("aria-label", `Graph of ${plural(places.size, "head")} and ${plural(edges.length, "line")}; arrow keys go from head to head, Enter shows the lines of one`);
  const defs = svg("defs");
  for (const kind of Object.keys(KINDS)) {
    defs.append(svg("marker", { id: `arrow-${kind}`, "data-kind": kind, viewBox: "0 0 8 8", refX: 2, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, svg("path", { d: "M0 0 8 4 0 8z" })));
  }
  root.append(defs);
  layers.forEach((layer, n) => root.append(svg("line", { class: "floor", x1: LEFT, x2: size[0], y1: 26 + step * n, y2: 26 + step * n }), svg("text", { class: "layer", x: 2, y: 30 + step * n }, String(layer))));
  const strongest = Math.max(...edges.map((edge) => edge.times), 1);
  const taken = [...places.values()].flatMap(({ x, y }) => [[x, y, BOX[0] / 2], [x, y + 18, 34]]);
  const lines = [];
  const labels = [];
  for (const edge of edges) {
    const points = curve(edge, places);
    const text = `${edge.kind.toUpperCase()} ${times(edge)}`;
    const half = 3.5 * text.length + 2;
    const [x, y] = labelAt(points, half, taken);
    const [a, b, c, d] = points.map((point) => point.map((value) => value.toFixed(1)).join(" "));
    const width = (0.8 + (2.2 * edge.times) / strongest).toFixed(2);
    const about = { class: "edge", "data-kind": edge.kind, "data-ends": `${edge.writer} ${edge.reader}`, "aria-hidden": "true" };
    lines.push(svg("g", about, svg("path", { d: `M${a}C${b} ${c} ${d}`, "stroke-width": width, "marker-end": `url(#arrow-${edge.kind})` })));
    labels.push(svg("g", about, svg("rect", { x: x - half, y: y - 8, width: 2 * half, height: 14, rx: 3 }), svg("text", { x, y: y + 3 }, text)));
  }
  root.append(...lines, ...labels); // no line crosses a label
  nodes = new Map();
  for (const row of rows) for (const i of row) nodes.set(i, drawHead(i, places.get(i), edges));
  root.append(...nodes.values());
  root.addEventListener("keydown", (event) => moveInGraph(event, rows, places));
  byId("place").replaceChildren(root);
  if (!edges.length) byId("place").replaceChildren(el("p", { className: "hint" }, data.edges.length ? "No kind of line is chosen." : "No head reads another: the model has one layer of attention."));
  if (!nodes.has(current)) current = nodes.keys().next().value ?? null;
  nodes.get(current)?.setAttribute("tabindex", "0");
}

function drawHead(i, { x, y }, edges) {
  const role = roleOf(i);
  const node = tinted(svg("g", { class: "node", role: "button", tabindex: -1, "aria-pressed": "false" }), i);
  const sign = role ? ({ dot: "\u25cf", ring: "\u25cb" }[role.mark] ?? role.letter) : "";
  node.append(svg("rect", { x: x - BOX[0] / 2, y: y - BOX[1] / 2, width: BOX[0], height: BOX[1], rx: 5 }), svg("text", { class: "name", x, y: y + 4 }, `${sign} ${place(i)}`.trim()));
  if (role && !role.mark) node.append(svg("text", { class: "role", x, y: y + 21 }, plainText(role.label, 14)));
  node.setAttribute("aria-label", `head ${said(i)}: ${sentence(i, edges)}`);
  node.append(svg("title", {}, `${said(i)}${role?.plain ? `, ${plainText(role.plain, 160)}` : ""}`));
  node.addEventListener("click", () => choose(i === chosen ? null : i));
  return node;
}

function sentence(i, edges) {
  const reads = edges.filter(({ reader }) => reader === i).map((edge) => `${said(edge.writer)} through its ${KINDS[edge.kind]} (${times(edge)})`);
  const read = edges.filter(({ writer }) => writer === i).map((edge) => `${said(edge.reader)} through its ${KINDS[edge.kind]} (${times(edge)})`);
  return [reads.length && `reads ${reads.join(", ")}`, read.length && `is read by ${read.join(", ")}`].filter(Boolean).join("; ");
}

// Shows the lines of one head alone; null shows all.
function choose(i) {
  chosen = i !== null && nodes.has(i) ? i : null;
  if (chosen !== null) focusOn(chosen);
  const near = new Set([chosen]);
  for (const line of document.querySelectorAll(".edge")) {
    const ends = line.dataset.ends.split(" ").map(Number);
    const mine = chosen === null || ends.includes(chosen);
    if (mine) ends.forEach((end) => near.add(end));
    line.classList.toggle("off", !mine);
  }
  for (const [n, node] of nodes) {
    node.classList.toggle("off", chosen !== null && !near.has(n));
    node.setAttribute("aria-pressed", String(n === chosen));
  }
  for (const row of document.querySelectorAll("tbody tr")) row.classList.toggle("now", chosen !== null && row.dataset.ends.split(" ").includes(String(chosen)));
  document.querySelector("#pairs tr.now")?.scrollIntoView({ block: "nearest" });
  byId("said").textContent = chosen === null ? "A click on a head shows its lines alone." : `${said(chosen)} ${sentence(chosen, shownEdges())}. Esc shows all lines.`;
}

function focusOn(i) {
  nodes.get(current)?.setAttribute("tabindex", "-1");
  current = i;
  nodes.get(i).setAttribute("tabindex", "0");
}

function moveInGraph(event, rows, places) {
  if (event.ctrlKey || event.metaKey || event.altKey || current === null) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    return choose(current === chosen ? null : current);
  }
  const { x, row } = places.get(current);
  const beside = rows[row][rows[row].indexOf(current) + { ArrowLeft: -1, ArrowRight: 1 }[event.key]];
  const nearest = (line) => line?.reduce((best, i) => (Math.abs(places.get(i).x - x) < Math.abs(places.get(best).x - x) ? i : best));
  const next = beside ?? nearest(rows[row + { ArrowUp: -1, ArrowDown: 1 }[event.key]]);
  if (next === undefined) return;
  event.preventDefault();
  focusOn(next);
  nodes.get(next).focus();
}

function headButton(i) {
  const role = roleOf(i);
  const open = el("button", { type: "button" }, place(i));
  open.addEventListener("click", () => choose(i));
  return role ? [open, " ", el("span", {}, plainText(role.label, 40))] : [open];
}

function fillTables() {
  const edges = shownEdges();
  const ordered = [...edges].sort((a, b) => b.times - a.times || a.reader - b.reader || a.writer - b.writer);
  const rows = ordered.map((edge) => {
    const through = el("td", {}, el("span", { className: "through" }, edge.kind.toUpperCase()));
    through.dataset.kind = edge.kind;
    const row = el("tr", {}, el("th", { scope: "row" }, ...headButton(edge.reader)), el("td", {}, ...headButton(edge.writer)), through);
    row.append(el("td", {}, number(edge.value, 3)), el("td", {}, times(edge)));
    row.dataset.ends = `${edge.writer} ${edge.reader}`;
    return row;
  });
  byId("pairs").tBodies[0].replaceChildren(...rows);
  byId("shown").textContent = `The strongest first: ${edges.length} of ${plural(data.pairs, "pair")}. Chance is an overlap of ${number(data.null, 3)}.`;
  const writes = [...nodes.keys()].map((i) => {
    const row = el("tr", {}, el("th", { scope: "row" }, headButton(i)[0]), el("td", {}, plainText(roleOf(i)?.label ?? "\u2013", 40)), ...data.heads[i].writes.map((value) => el("td", {}, number(value, 3))));
    row.dataset.ends = String(i);
    return row;
  });
  byId("writes").tBodies[0].replaceChildren(...writes);
}

function draw() {
  drawGraph();
  fillTables();
  choose(chosen);
}

function buildChoices() {
  for (const [kind, name] of Object.entries(KINDS)) {
    const box = el("input", { type: "checkbox", checked: true });
    const label = el("label", {}, box, " ", el("b", {}, kind.toUpperCase()), ` ${name}`);
    label.dataset.kind = kind;
    box.addEventListener("change", () => {
      if (box.checked) drawnKinds.add(kind);
      else drawnKinds.delete(kind);
      draw();
    });
    byId("kinds").append(label);
  }
  const steps = [...new Set([4, 8, 12, 25, data.most].filter((step) => step <= data.most))].sort((a, b) => a - b);
  byId("most").append(...steps.map((step) => el("option", { value: step, selected: step === most }, String(step))));
  byId("most").addEventListener("change", (event) => {
    most = Number(event.target.value);
    draw();
  });
}

byId("model").textContent = plainText(data.model, 100);
buildChoices();
draw();
let drawn = byId("place").clientWidth;
window.addEventListener("resize", () => {
  if (byId("place").clientWidth !== drawn) draw();
  drawn = byId("place").clientWidth;
});
document.addEventListener("keydown", (event) => event.key === "Escape" && choose(null));
document.documentElement.dataset.ready = "true";
