// The grid of all heads, a row a layer; one tab stop, arrow keys move within.

const tiles = [];

function buildGrid() {
  const grid = byId("grid");
  const width = Math.max(1, ...heads.map((head) => head.head + 1));
  grid.style.setProperty("--heads", width);
  grid.classList.toggle("dense", width > 16);
  const top = el("div", { className: "row", role: "row" }, el("span", { role: "columnheader", className: "corner" }, "layer"));
  for (let i = 0; i < width; i++) top.append(el("span", { role: "columnheader", className: "column" }, String(i)));
  grid.append(top);
  for (const layer of new Set(heads.map((head) => head.layer))) {
    const row = el("div", { className: "row", role: "row" }, el("span", { role: "rowheader", className: "corner" }, String(layer)));
    for (const head of heads.filter((h) => h.layer === layer)) row.append(buildTile(head));
    grid.append(row);
  }
  grid.addEventListener("keydown", moveInGrid);
}

function buildTile(head) {
  const canvas = el("canvas", { "aria-hidden": "true" });
  const { role, value } = head.roles[0] ?? {};
  const name = role === undefined ? "" : look.roles[role].label;
  const label = el("span", { className: "role" }, name ? `${plainText(name, 18)}` : "\u00a0");
  const button = el("button", { type: "button", className: "tile", tabIndex: -1 }, canvas, label);
  button.setAttribute("aria-label", `Layer ${head.layer}, head ${head.head}: ${rolesText(head) || "no role"}`);
  button.title = `${head.name} ${rolesText(head)}`;
  button.style.setProperty("--role", roleColour(role));
  button.style.setProperty("--strength", value ?? 0);
  button.addEventListener("click", () => selectHead(head.index));
  tiles[head.index] = { button, canvas };
  return el("div", { role: "gridcell", className: "cell" }, button);
}

function drawGrid() {
  for (const head of heads) drawMap(tiles[head.index].canvas, head, 64);
}

function moveInGrid(event) {
  const now = heads[state.head];
  const layers = [...new Set(heads.map((head) => head.layer))];
  const row = layers.indexOf(now.layer);
  const find = (layer, column) => {
    const inLayer = heads.filter((head) => head.layer === layer);
    return inLayer[Math.min(Math.max(column, 0), inLayer.length - 1)];
  };
  const moves = {
    ArrowLeft: () => find(now.layer, now.head - 1),
    ArrowRight: () => find(now.layer, now.head + 1),
    ArrowUp: () => find(layers[Math.max(row - 1, 0)], now.head),
    ArrowDown: () => find(layers[Math.min(row + 1, layers.length - 1)], now.head),
    Home: () => find(now.layer, 0),
    End: () => find(now.layer, Infinity),
    PageUp: () => find(layers[0], now.head),
    PageDown: () => find(layers.at(-1), now.head),
  };
  const move = moves[event.key];
  if (!move || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  selectHead(move().index);
  tiles[state.head].button.focus();
}

function markTile(head) {
  for (const { button } of tiles) {
    button.tabIndex = -1;
    button.removeAttribute("aria-current");
  }
  tiles[head.index].button.tabIndex = 0;
  tiles[head.index].button.setAttribute("aria-current", "true");
}

// The filter: chips above, everything that does not match steps back.
function buildRoles() {
  const counts = look.roles.map((role) => role.played);
  const none = heads.filter((head) => !head.roles.length).length;
  const chip = (name, count, role, title) => {
    const button = el("button", { type: "button", className: "chip", "aria-pressed": "false", title });
    button.append(el("i", {}), el("span", {}, name), el("b", {}, String(count)));
    button.style.setProperty("--role", role === null ? "transparent" : roleColour(role));
    button.addEventListener("click", () => {
      if (role === null) state.roles.clear();
      else if (!state.roles.delete(role ?? look.roles.length)) state.roles.add(role ?? look.roles.length);
      emit("filter");
    });
    on("filter", () => {
      const pressed = role === null ? !state.roles.size : state.roles.has(role ?? look.roles.length);
      button.setAttribute("aria-pressed", String(pressed));
    });
    byId("roles").append(button);
  };
  chip("all heads", heads.length, null, "Show every head");
  look.roles.forEach((role, i) => role.played && chip(plainText(role.label, 40), counts[i], i, plainText(role.formula || role.source, 300)));
  if (none) chip("no role", none, undefined, "Heads that play none of the roles looked for");
}

function filterGrid() {
  const shown = heads.filter(matches);
  for (const head of heads) tiles[head.index].button.classList.toggle("off", !matches(head));
  byId("count").textContent = state.roles.size ? `${shown.length} of ${plural(heads.length, "head")}` : plural(heads.length, "head");
  if (shown.length && !matches(heads[state.head])) selectHead(strongest(shown).index);
}

// Of the heads shown, the one with the highest score in a chosen role.
function strongest(shown) {
  const score = (head) => Math.max(0, ...head.roles.filter(({ role }) => state.roles.has(role)).map(({ value }) => value));
  return shown.reduce((best, head) => (score(head) > score(best) ? head : best));
}
