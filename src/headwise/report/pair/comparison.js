// Two looks side by side. Strings are hostile: they reach the document as text nodes alone.

const data = JSON.parse(byId("look").textContent);
const key = ([layer, head]) => `${layer}.${head}`;
const pairOf = [new Map(), new Map()]; // by side and place: the number of the pair
data.pairs.forEach((pair, i) => {
  pairOf[0].set(key(pair.before), i);
  pairOf[1].set(key(pair.after), i);
});
const cells = [new Map(), new Map()];
const rows = new Map();
const STEP = 60;
const SAID = 6; // heads named in a row of the roles
let most = STEP;

function tinted(node, role) {
  node.style.setProperty("--role", `var(--role-${data.roles[role].colour})`);
  node.style.setProperty("--on", `var(--on-${data.roles[role].colour})`);
  return node;
}

function sign({ mark, letter }) {
  return { dot: "\u25cf", ring: "\u25cb" }[mark] ?? letter;
}

function badge(role) {
  return tinted(el("span", { className: "badge" }, el("i", {}, sign(data.roles[role])), plainText(data.roles[role].label, 40)), role);
}

function fillRoles() {
  const places = (role, side, kind) => data.pairs.filter((pair) => pair[kind].includes(role)).map((pair) => key(pair[side]));
  const said = (list) => (list.length > SAID ? `${list.slice(0, SAID).join(" ")} and ${list.length - SAID} more` : list.join(" "));
  data.roles.forEach((role, i) => {
    const row = el("tr", {}, el("th", { scope: "row" }, badge(i)), ...role.counts.map((count) => el("td", {}, count === null ? "\u2013" : String(count))));
    row.append(el("td", {}, said(places(i, "after", "gained"))), el("td", {}, said(places(i, "before", "lost"))));
    byId("roles").tBodies[0].append(row);
  });
}

function fillGrid(side) {
  const { model, heads, width } = data.sides[side];
  byId(`name-${side}`).textContent = `${side ? "After: " : "Before: "}${plainText(model, 80)}`;
  fillMatrix(byId(`grid-${side}`), width, heads, (head) => cellOf(side, head));
}

function cellOf(side, [layer, head, roles]) {
  const main = roles.find(([role]) => !data.roles[role].mark);
  const place = key([layer, head]);
  const pair = pairOf[side].get(place);
  const shown = main ?? roles[0];
  const cell = el("button", { type: "button", className: "cell" }, shown ? sign(data.roles[shown[0]]) : "\u00b7");
  if (main) tinted(cell, main[0]);
  if (pair === undefined) cell.classList.add("alone");
  else if (data.pairs[pair].gained.length || data.pairs[pair].lost.length) cell.classList.add("changed");
  const said = roles.map(([role, value]) => `${plainText(data.roles[role].label, 40)} ${number(value, 2)}`).join(", ") || "no role or state";
  cell.title = `${place}: ${said}`;
  cell.setAttribute("aria-label", `${side ? "after" : "before"}, head ${cell.title}`);
  cell.addEventListener("click", () => choose(pair));
  cells[side].set(place, cell);
  return cell;
}

function choose(pair) {
  if (pair === undefined) return;
  document.querySelectorAll(".now").forEach((node) => node.classList.remove("now"));
  const { before, after } = data.pairs[pair];
  cells[0].get(key(before))?.classList.add("now");
  cells[1].get(key(after))?.classList.add("now");
  if (!rows.has(pair)) fillHeads(Infinity);
  rows.get(pair).classList.add("now");
}

function fillHeads(count) {
  most = count;
  const far = (pair) => Math.max(pair.moved ?? 0, pair.near ?? 0);
  const changed = (pair) => Number(pair.gained.length + pair.lost.length > 0);
  const order = data.pairs.map((_, i) => i);
  order.sort((a, b) => changed(data.pairs[b]) - changed(data.pairs[a]) || far(data.pairs[b]) - far(data.pairs[a]) || a - b);
  rows.clear();
  for (const i of order.slice(0, most)) {
    const pair = data.pairs[i];
    const scores = pair.scores.map(([label, first, second]) => `${plainText(label, 40)} ${number(first, 2)} \u2192 ${number(second, 2)}`);
    const row = el("tr", {}, el("th", { scope: "row" }, key(pair.before)), el("td", {}, key(pair.after)));
    row.append(el("td", {}, ...pair.gained.map(badge)), el("td", {}, ...pair.lost.map(badge)));
    row.append(el("td", {}, number(pair.moved ?? pair.near, 3)), el("td", {}, scores.join(", ")));
    row.addEventListener("click", () => choose(i));
    rows.set(i, row);
  }
  byId("heads").tBodies[0].replaceChildren(...rows.values());
  byId("more").hidden = data.pairs.length <= most;
  byId("more").textContent = `show ${Math.min(STEP, data.pairs.length - most)} more of ${plural(data.pairs.length, "head")}`;
}

byId("summary").replaceChildren(...data.summary.map((line) => el("p", {}, plainText(line, 300))));
fillRoles();
fillGrid(0);
fillGrid(1);
fillHeads(STEP);
byId("more").addEventListener("click", () => fillHeads(most + STEP));
document.documentElement.dataset.ready = "true";
