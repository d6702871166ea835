// The choice of a role, and the search for a token. A role turns the matrix into the heatmap of its score.

const FEW_CHIPS = 14;

function buildRoles() {
  const none = heads.filter((head) => !head.roles.length).length;
  const place = byId("roles");
  const chip = (name, count, role, title, letter) => {
    const button = el("button", { type: "button", className: "chip", "aria-pressed": "false", title });
    if (role !== null) button.append(el("i", {}, letter));
    button.append(el("span", {}, name), el("b", {}, count.toLocaleString("en")));
    button.style.setProperty("--role", roleColour(role));
    button.style.setProperty("--on", roleInk(role));
    button.addEventListener("click", () => {
      const chosen = role === null ? null : (role ?? look.roles.length);
      state.role = state.role === chosen ? null : chosen;
      emit("filter");
      if (state.role !== null) goToFirst();
    });
    on("filter", () => {
      const pressed = state.role === (role === null ? null : (role ?? look.roles.length));
      button.setAttribute("aria-pressed", String(pressed));
    });
    place.append(button);
  };
  chip("all heads", heads.length, null, "Show every head");
  const played = look.roles.map((role, i) => [role, i]).filter(([role]) => role.played);
  for (const [role, i] of played) chip(plainText(role.label, 40), role.played, i, [role.plain, plainText(role.formula, 300)].filter(Boolean).join("\n"), signOf(i));
  if (none) chip("no role or state", none, undefined, "Heads that have none of the measured roles and states", "\u00b7");
  const chips = [...place.children].slice(1); // parallel to `played`
  if (played.length > FEW_CHIPS) foldChips(place, rarest(played, played.length - FEW_CHIPS).map((n) => chips[n]));
}

// Annotated sentences give a role for every relation of grammar: those of the fewest heads wait behind a button.
function rarest(played, many) {
  const places = [...played.keys()];
  const relation = (n) => played[n][0].label.includes(" -> ");
  const relations = places.filter(relation).sort((a, b) => played[a][0].played - played[b][0].played || b - a);
  return [...relations, ...places.filter((n) => !relation(n)).reverse()].slice(0, many);
}

function foldChips(place, rare) {
  const more = el("button", { type: "button", className: "chip more-chips", "aria-expanded": "false" }, `${rare.length} more`);
  const fold = (open) => {
    rare.forEach((button) => (button.hidden = !open));
    more.setAttribute("aria-expanded", String(open));
    more.textContent = open ? "fewer" : `${rare.length} more`;
  };
  more.addEventListener("click", () => fold(more.getAttribute("aria-expanded") === "false"));
  place.append(more);
  fold(false);
}

// A chosen role shows its score in every head; a head that plays it is framed.
function filterGrid() {
  const shown = heads.filter(matches);
  byId("count").textContent = state.role !== null ? `${shown.length} of ${plural(heads.length, "head")}` : plural(heads.length, "head");
  const scored = state.role !== null && state.role < look.roles.length;
  if (scored) show(FIRST_SCORE + state.role);
  else show(typeof state.show === "number" && state.show >= FIRST_SCORE && state.show < FIRST_SCORE + look.roles.length ? "role" : state.show);
}

// Opens the head with the highest score in the chosen role.
function goToFirst() {
  const shown = heads.filter(matches);
  if (!shown.length) return;
  const score = (head) => head.roles.find(({ role }) => role === state.role)?.value ?? 0;
  const first = shown.reduce((best, head) => (score(head) > score(best) ? head : best));
  selectHead(first.index);
  tiles[first.index].button.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// --- search ----------------------------------------------------------------------------------------------------------

let found = []; // the cells whose text holds what was typed

function buildSearch() {
  const input = byId("search");
  byId("finder").hidden = !look.cells.length;
  input.addEventListener("input", () => search(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") stepMatch(event.shiftKey ? -1 : 1);
    if (event.key === "Escape" && input.value) {
      event.stopPropagation();
      input.value = "";
      search("");
    }
  });
}

function search(typed) {
  const text = typed.trim() ? typed.toLowerCase() : "";
  state.search = text;
  found = text ? look.cells.map((cell, i) => (cell.text.toLowerCase().includes(text) ? i : -1)).filter((i) => i >= 0) : [];
  markFound();
  for (const head of heads) head.sought = found.length ? massOn(head, found) : null;
  const best = heads.filter((head) => head.sought !== null).sort((a, b) => b.sought - a.sought || a.index - b.index).slice(0, 5);
  const said = !text ? [] : [`${plural(found.length, look.cells.some((c) => c.count > 1) ? "cell" : "token")}${best.length ? "; heads that look there most: " : ""}`];
  byId("matches").replaceChildren(...said, ...best.map(headLink));
  if (text && found.length) show("search");
  else if (state.show === "search") show("role");
  else fillShow();
}

function headLink(head) {
  const button = el("button", { type: "button", className: "link" }, head.name, el("b", {}, ` ${number(head.sought, 2)}`));
  button.addEventListener("click", () => selectHead(head.index));
  return button;
}

// Mean mass of a query on the chosen keys, over the queries that may look back at one.
function massOn(head, keys) {
  if (head.columns !== look.cells.length || !head.sides[1].axis?.main) return null;
  const first = head.causal ? keys[0] : 0;
  let sum = 0;
  for (let i = first; i < head.rows; i++) for (const j of keys) sum += weightAt(head, i, j, kept.weight);
  return head.rows > first ? sum / (head.rows - first) : null;
}

function stepMatch(step) {
  if (!found.length || !overText(heads[state.head])) return;
  const at = found.indexOf(state.query);
  const next = at < 0 ? (step > 0 ? 0 : found.length - 1) : (at + step + found.length) % found.length;
  selectQuery(found[next]);
  text.nodes[found[next]].scrollIntoView({ block: "nearest" });
}

function markFound() {
  const chosen = new Set(found);
  text.nodes.forEach((node, i) => node.classList.toggle("found", chosen.has(i)));
}
