// The overview: a row a layer, a column a head; coloured by role, by a number, or with the map itself.

const tiles = []; // by head: { button, letter, value, canvas }
const shownRows = []; // the heads as they stand, row after row
const INK_FROM = 116; // of the ramp: from here on black is read more easily than white
const PARTS = { encoder: "Encoder", decoder: "Decoder", cross: "Cross-attention" };

// Maps are drawn when they come into sight: a page may hold thousands.
const sight = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) drawTile(heads[Number(entry.target.dataset.head)]);
});

function buildGrid() {
  const grid = byId("grid");
  const width = Math.max(1, ...heads.map((head) => head.head + 1));
  grid.style.setProperty("--heads", width);
  document.documentElement.classList.toggle("wide", width > 24);
  const parts = [...new Set(heads.map((head) => head.part))];
  for (const part of parts) {
    const group = el("div", { role: "rowgroup", className: "part" });
    const title = PARTS[part] ?? plainText(part, 40);
    if (parts.length > 1) group.append(el("h3", { className: "part-title" }, title));
    group.setAttribute("aria-label", title);
    const top = el("div", { className: "row top-row", role: "row" }, el("span", { role: "columnheader", className: "corner" }, width > 24 ? "" : "layer"));
    for (let i = 0; i < width; i++) top.append(el("span", { role: "columnheader", className: "column" }, String(i)));
    group.append(top);
    const layers = new Map();
    for (const head of heads) if (head.part === part) layers.set(head.layer, [...(layers.get(head.layer) ?? []), head]);
    for (const [layer, members] of layers) {
      const row = el("div", { className: "row", role: "row" }, el("span", { role: "rowheader", className: "corner", title: plainText(members[0].module, 100) }, String(layer)));
      for (const head of members) row.append(buildTile(head));
      shownRows.push({ row, members });
      group.append(row);
    }
    grid.append(group);
  }
  grid.addEventListener("keydown", moveInGrid);
  grid.addEventListener("click", (event) => {
    const tile = event.target.closest(".tile");
    if (tile) selectHead(Number(tile.dataset.head));
  });
  grid.addEventListener("pointerover", (event) => {
    const tile = event.target.closest(".tile");
    if (tile) tile.title = tileTitle(heads[Number(tile.dataset.head)]);
  });
}

const LARGEST = 67; // pixels of a cell
const LEAST_MAP = 15;

// The matrix fits the screen: its cells are as large as the panel and the window allow, down to three pixels.
function sizeGrid() {
  const grid = byId("grid");
  const box = grid.parentNode;
  const columns = Number(grid.style.getPropertyValue("--heads"));
  const rows = shownRows.length;
  const parts = grid.children.length;
  const within = (value, low, high) => Math.max(low, Math.min(value, high));
  const room = box.clientWidth - 12 - 34;
  const top = box.getBoundingClientRect().top + window.scrollY;
  const tall = Math.max(window.innerHeight - top - 62, 0.5 * window.innerHeight, 200) - parts * 20 - (parts > 1 ? 28 * parts : 0);
  const each = Math.min(tall / rows, room / columns);
  const gap = each > 26 ? 4 : each > 11 ? 2 : each > 4 ? 1 : 0;
  let width = within(room / columns - gap, 3, LARGEST);
  let height = within(Math.min(tall / rows - gap, Math.max(width, 12)), 3, LARGEST);
  if (state.show === "map") width = height = Math.max(width, LEAST_MAP);
  else width = Math.min(width, Math.max(4.5 * height, 16));
  const set = (name, value) => grid.style.setProperty(name, `${Math.floor(10 * value) / 10}px`);
  set("--gap", gap);
  set("--w", width);
  set("--h", height);
  set("--letter", within(Math.min(0.8 * height, 0.45 * width), 7, 18));
  set("--number", within(Math.min(0.8 * height, 0.3 * width), 7, 13));
  set("--mark", within(0.2 * Math.min(height, width), 2.5, 8));
  const beside = height < 30 && width >= 44 && height >= 10;
  grid.classList.toggle("beside", beside);
  grid.classList.toggle("valued", beside || (height >= 30 && width >= 30));
  grid.classList.toggle("lettered", height >= 9 && width >= 9);
  grid.classList.toggle("numbered", height >= 9 && width >= 24);
  const every = (nodes, step) => nodes.forEach((node, i) => node.classList.toggle("unsaid", i % step !== 0));
  every(shownRows.map(({ row }) => row.firstChild), Math.ceil(11 / (height + gap)));
  for (const row of grid.querySelectorAll(".top-row")) every([...row.querySelectorAll(".column")], Math.ceil(15 / (width + gap)));
}

function buildTile(head) {
  const letter = el("b", { className: "letter", "aria-hidden": "true" });
  const value = el("span", { className: "value", "aria-hidden": "true" });
  const button = el("button", { type: "button", className: "tile", tabIndex: -1 }, letter, value);
  button.dataset.head = head.index;
  button.setAttribute("aria-label", `Layer ${head.layer}, head ${head.head}: ${plainText(rolesText(head), 120) || "no role or state"}`);
  tiles[head.index] = { button, letter, value, canvas: null };
  return el("div", { role: "gridcell", className: "cell" }, button);
}

function tileTitle(head) {
  const value = shownValue(head);
  const said = value === undefined ? "" : ` \u00b7 ${shownName()} ${number(value, shownDigits())}`;
  return `${head.name}${said} \u00b7 ${plainText(rolesText(head), 200) || "no role or state"}`;
}

// What the overview shows as a number, if it shows one.
function shownValue(head) {
  if (state.show === "search") return head.sought ?? null;
  return typeof state.show === "number" ? head.values[state.show] : undefined;
}

function shownName() {
  return state.show === "search" ? `mass on \u201c${plainText(state.search, 20)}\u201d` : plainText(look.statistics[state.show].label, 40);
}

function shownDigits() {
  return state.show === "search" ? 2 : look.statistics[state.show].digits;
}

function fillShow() {
  const options = [["role", "role"], ["map", "attention map"]];
  if (state.search) options.push(["search", `mass on \u201c${plainText(state.search, 20)}\u201d`]);
  look.statistics.forEach((s, i) => heads.some((head) => head.values[i] !== null) && options.push([i, plainText(s.label, 40)]));
  byId("show").replaceChildren(...options.map(([value, label]) => el("option", { value }, label)));
  byId("show").value = String(state.show);
}

function show(what) {
  state.show = what;
  fillShow();
  sizeGrid();
  drawGrid();
}

function buildControls() {
  fillShow();
  byId("show").addEventListener("change", (event) => {
    const chosen = event.target.value;
    show(/^\d+$/.test(chosen) ? Number(chosen) : chosen);
  });
  byId("order").addEventListener("change", (event) => {
    state.order = event.target.value;
    orderGrid();
  });
}

// Within each row: by number, by role, or by what is shown, the highest first.
function orderGrid() {
  const rank = (head) => head.main?.role ?? look.roles.length;
  const value = (head) => shownValue(head) ?? head.main?.value ?? -Infinity;
  const orders = {
    head: (a, b) => a.index - b.index,
    role: (a, b) => rank(a) - rank(b) || value(b) - value(a) || a.index - b.index,
    value: (a, b) => value(b) - value(a) || a.index - b.index,
  };
  for (const line of shownRows) {
    line.members.sort(orders[state.order]);
    line.row.append(...line.members.map((head) => tiles[head.index].button.parentNode));
  }
  byId("grid").classList.toggle("sorted", state.order !== "head");
}

function drawGrid() {
  const grid = byId("grid");
  const numeric = state.show !== "role" && state.show !== "map";
  grid.dataset.show = numeric ? "number" : state.show;
  const heat = state.role !== null && state.show === FIRST_SCORE + state.role;
  const known = numeric ? heads.map(shownValue).filter((value) => value !== null) : [];
  const low = known.reduce((a, b) => Math.min(a, b), 0);
  const high = known.reduce((a, b) => Math.max(a, b), 0) || 1;
  for (const head of heads) {
    const tile = tiles[head.index];
    const main = head.main;
    tile.button.style.setProperty("--role", roleColour(main?.role));
    tile.button.style.setProperty("--on", roleInk(main?.role));
    tile.button.dataset.marks = head.marks.join(" ");
    tile.button.classList.toggle("off", !heat && !matches(head));
    tile.button.classList.toggle("plays", heat && matches(head));
    if (numeric) paintNumber(tile, shownValue(head), low, high);
    else {
      tile.letter.textContent = main ? look.roles[main.role].letter : head.marks.length ? "" : "\u00b7";
      tile.value.textContent = main ? number(main.value, 2) : "";
      tile.button.classList.toggle("none", !main);
    }
    if (state.show === "map") {
      if (!tile.canvas) tile.button.prepend((tile.canvas = el("canvas", { "aria-hidden": "true" })));
      sight.observe(tile.button);
    } else sight.unobserve(tile.button);
  }
  if (state.order !== "head") orderGrid();
  drawLegend(low, high);
}

function paintNumber(tile, value, low, high) {
  tile.button.classList.toggle("none", value === null);
  tile.letter.textContent = value === null ? "\u2013" : number(value, shownDigits());
  tile.value.textContent = "";
  if (value === null) return;
  const at = 3 * Math.round((255 * (value - low)) / (high - low));
  tile.button.style.setProperty("--role", `rgb(${RAMP[at]} ${RAMP[at + 1]} ${RAMP[at + 2]})`);
  tile.button.style.setProperty("--on", at > 3 * INK_FROM ? "#111" : "#fff");
}

function drawTile(head) {
  const tile = tiles[head.index];
  const drawn = `${state.shade} ${state.weigh}`;
  if (tile.canvas.dataset.shade === drawn) return;
  tile.canvas.dataset.shade = drawn;
  drawMap(tile.canvas, head, 64);
}

function drawLegend(low, high) {
  const place = byId("legend");
  if (state.show === "role") place.replaceChildren("letter and colour: the role, as above; number: its score; \u25cf a sink, \u25cb broad: states, with a role or without; grey: no role");
  else if (state.show === "map") legend(place);
  else {
    const digits = shownDigits();
    place.replaceChildren(el("span", {}, number(low, digits)), ramp(), el("span", {}, number(high, digits)), ...(state.role !== null && state.role < look.roles.length ? [" framed: plays it"] : []));
  }
}

function moveInGrid(event) {
  const now = heads[state.head];
  const y = shownRows.findIndex((line) => line.members.includes(now));
  const x = shownRows[y].members.indexOf(now);
  const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
  const find = (row, column) => {
    const { members } = shownRows[clamp(row, shownRows.length)];
    return members[clamp(column, members.length)];
  };
  const moves = {
    ArrowLeft: () => find(y, x - 1),
    ArrowRight: () => find(y, x + 1),
    ArrowUp: () => find(y - 1, x),
    ArrowDown: () => find(y + 1, x),
    Home: () => find(y, 0),
    End: () => find(y, Infinity),
    PageUp: () => find(0, x),
    PageDown: () => find(shownRows.length, x),
  };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter") {
    event.preventDefault();
    focusPane();
  }
  const move = moves[event.key];
  if (!move) return;
  event.preventDefault();
  selectHead(move().index);
  tiles[state.head].button.focus();
}

let marked = null;

function markTile(head) {
  if (marked) {
    marked.tabIndex = -1;
    marked.removeAttribute("aria-current");
  }
  marked = tiles[head.index].button;
  marked.tabIndex = 0;
  marked.setAttribute("aria-current", "true");
}
