// The effects of heads on an answer. Strings are hostile: they reach the document as text nodes alone.

const data = JSON.parse(byId("look").textContent);
const key = ([layer, head]) => `${layer}.${head}`;
const cells = new Map();
const rows = new Map();
const lines = new Map();
const STEP = 20;
const MOST_LINES = 24; // heads in the table of positions, before one is chosen
let most = STEP;
let largest = 0;
for (const [, , effect] of data.heads) largest = Math.max(largest, Math.abs(effect ?? 0));
largest ||= 1;

const byEffect = data.heads.map((_, i) => i).sort((a, b) => Math.abs(data.heads[b][2] ?? 0) - Math.abs(data.heads[a][2] ?? 0) || a - b);

function signed(effect, digits) {
  if (effect === null) return "\u2013";
  const text = number(Math.abs(effect), digits);
  return Number(text) ? `${effect < 0 ? "\u2212" : "+"}${text}` : text;
}

// Orange above 0, blue below, bare at 0; the ink that reads well upon it.
function tinted(node, effect) {
  const part = Math.min(Math.abs(effect ?? 0) / largest, 1);
  const [colour, ink] = effect < 0 ? ["--minus", "--on-0"] : ["--plus", "--on-1"];
  node.style.setProperty("--role", `color-mix(in oklab, var(${colour}) ${(100 * part).toFixed(1)}%, var(--bare))`);
  node.style.setProperty("--on", part > 0.75 ? `var(${ink})` : "var(--ink)");
  return node;
}

function fillHead() {
  byId("title").textContent = data.title;
  byId("model").textContent = plainText(data.model, 100);
  byId("metric").textContent = plainText(data.metric, 300);
  for (const { label, tokens } of data.texts) {
    const text = el("dd");
    tokens.forEach((token, i) => {
      const node = el(data.texts.some((other) => other.tokens[i] !== token) ? "mark" : "span");
      appendText(node, token);
      text.append(node);
    });
    byId("texts").append(el("dt", {}, label), text);
  }
  byId("summary").replaceChildren(...data.sentences.map((line) => el("p", {}, plainText(line, 400))));
  byId("legend").textContent = data.legend;
  byId("scale").replaceChildren(`\u2212${number(largest, 2)}`, el("i", { "aria-hidden": "true" }), `+${number(largest, 2)}`);
}

function cellOf([layer, head, effect]) {
  const place = key([layer, head]);
  const cell = tinted(el("button", { type: "button", className: "cell" }, Math.abs(effect ?? 0) < 0.005 ? "\u00b7" : signed(effect, 2)), effect);
  cell.title = `${place}: ${signed(effect, 3)}`;
  cell.setAttribute("aria-label", `head ${place}, effect ${signed(effect, 3)}`);
  cell.addEventListener("click", () => choose(place));
  cells.set(place, cell);
  return cell;
}

function choose(place) {
  document.querySelectorAll(".now").forEach((node) => node.classList.remove("now"));
  cells.get(place).classList.add("now");
  if (!rows.has(place)) fillHeads(data.heads.length);
  rows.get(place).classList.add("now");
  rows.get(place).scrollIntoView({ block: "nearest" });
  if (data.positions.length) {
    if (!lines.has(place)) fillPositions(place);
    lines.get(place)?.classList.add("now");
  }
}

function fillHeads(count) {
  most = count;
  rows.clear();
  for (const i of byEffect.slice(0, most)) {
    const place = key(data.heads[i]);
    const open = el("button", { type: "button" }, place);
    const row = el("tr", {}, el("th", { scope: "row" }, open), el("td", {}, signed(data.heads[i][2], 3)));
    row.addEventListener("click", () => choose(place));
    rows.set(place, row);
  }
  byId("heads").tBodies[0].replaceChildren(...rows.values());
  byId("shown").textContent = `The largest effects first, of either sign: ${Math.min(most, data.heads.length)} of ${plural(data.heads.length, "head")}.`;
  byId("more").hidden = data.heads.length <= most;
  byId("more").textContent = `show ${Math.min(STEP, data.heads.length - most)} more`;
}

// The heads with the largest effects, and the chosen one, at each position.
function fillPositions(chosen) {
  const kept = new Map(data.positions.map(([head, effects]) => [head, effects]));
  const shown = byEffect.filter((i) => kept.has(i));
  const some = new Set(shown.slice(0, MOST_LINES));
  shown.filter((i) => key(data.heads[i]) === chosen).forEach((i) => some.add(i));
  const size = Math.max(0, ...data.positions.map(([, effects]) => effects.length));
  const names = Array.from({ length: size }, (_, at) => [...new Set(data.texts.map(({ tokens }) => tokens[at] ?? ""))].map((token) => plainText(token, 16)).join(" | "));
  byId("positions").tHead.replaceChildren(el("tr", {}, el("td"), ...names.map((name, at) => el("th", { scope: "col" }, `${at} ${name}`))));
  lines.clear();
  for (const i of [...some].sort((a, b) => a - b)) {
    const place = key(data.heads[i]);
    const row = el("tr", {}, el("th", { scope: "row" }, place));
    for (const effect of kept.get(i)) row.append(tinted(el("td", { title: signed(effect, 3) }, Math.abs(effect ?? 0) < 0.005 ? "\u00b7" : signed(effect, 2)), effect));
    lines.set(place, row);
  }
  byId("positions").tBodies[0].replaceChildren(...lines.values());
  byId("which").textContent = `A column is a position, with its token in the clean and in the corrupted text where they differ: ${plural(lines.size, "head")} with the largest effects; a click on a head above adds it.`;
  byId("by-position").hidden = false;
}

fillHead();
fillMatrix(byId("grid"), data.width, data.heads, cellOf);
const [first] = cells.values();
document.querySelector(".effects").classList.toggle("small", !first || first.clientWidth < 30 || first.clientHeight < 9);
fillHeads(STEP);
if (data.positions.length) fillPositions(null);
byId("more").addEventListener("click", () => fillHeads(most + STEP));
document.documentElement.dataset.ready = "true";
