// What the page carries, and small helpers for the document. Strings of the reader, of files and of the tokenizer reach
// the document as text nodes only.

const chapter = JSON.parse(byId("chapter").textContent);

const listeners = {};
function on(event, listener) {
  (listeners[event] ??= []).push(listener);
}
function emit(event, value) {
  for (const listener of listeners[event] ?? []) listener(value);
}

const say = (id, text) => (byId(id).textContent = text);
const fill = (id, ...nodes) => byId(id).replaceChildren(...nodes);
const setPressed = (node, pressed) => node.setAttribute("aria-pressed", String(pressed));

// One more shape in a drawing.
function put(into, tag, attributes) {
  const shape = into.append(tag);
  for (const [name, value] of Object.entries(attributes)) shape.attr(name, value);
  return shape;
}

function button(label, act, properties = {}) {
  const node = el("button", { type: "button", ...properties }, label);
  node.addEventListener("click", act);
  return node;
}

// The text with W_Q, d_k and similar names as a letter with an index, as the chapter sets them.
function typeset(text) {
  return text.split(/\b([Wdh]_(?:Q|K|V|O|kv|k|model))(?![A-Za-z0-9_])/).flatMap((part, n) => {
    const [letter, index] = n % 2 ? part.split("_") : [];
    return letter ? [el("i", {}, letter), el("sub", {}, index)] : [part];
  });
}

// A number with its sign; the typographic minus, so that a minus is as wide as a plus.
function signed(value, digits = 3) {
  const shown = Math.abs(value).toFixed(digits);
  return Number(shown) === 0 ? `0.${"0".repeat(digits)}` : `${value > 0 ? "+" : "\u2212"}${shown}`;
}

// A very small number, as 3e-6; a plain 0 where nothing differs.
function tiny(value) {
  if (value === 0) return "0";
  if (!Number.isFinite(value)) return "not a number";
  return value < 0.001 ? value.toExponential(0) : value < 0.1 ? value.toPrecision(1) : value.toFixed(value < 10 ? 1 : 0);
}

const thousands = (value) => Math.round(value).toLocaleString("en");

function bytes(value) {
  for (const [size, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return `${(value / size).toFixed(value / size < 10 ? 1 : 0)} ${name}`;
  return `${value} bytes`;
}

const largest = (values) => Math.max(...values.map(Math.abs), 1e-9);

function largestDifference(a, b) {
  let most = 0;
  for (let i = 0; i < a.length; i++) most = Math.max(most, Math.abs(a[i] - b[i]));
  return most;
}

// Drawing of a fixed box that scales with its column.
function picture(width, height, label) {
  const svg = drawing("100%", null).attr("viewBox", `0 0 ${width} ${height}`).attr("role", "img").attr("aria-label", label);
  svg.attr("height", null).classed("broad", width >= 500);
  return svg;
}

// What a screen reader is told: at most one message in half a second, the latest.
const spoken = { timer: 0, text: "" };
function tell(text) {
  spoken.text = text;
  spoken.timer ||= setTimeout(() => {
    spoken.timer = 0;
    say("said", spoken.text);
  }, 500);
}

// Several items of which one is chosen: one stop for Tab, arrow keys inside. `across`: how many stand in a row.
function rove(box, across, { pick, label }) {
  box.addEventListener("keydown", (event) => {
    const items = [...box.querySelectorAll("[data-item]")];
    const here = items.indexOf(document.activeElement);
    const wide = typeof across === "function" ? across() : across;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide, Home: -(here % wide), End: wide - 1 - (here % wide) };
    if (here < 0 || !(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = items[here + moves[event.key]];
    if (!next) return;
    settle(box, next);
    next.focus();
    pick?.(next);
  });
  box.setAttribute("aria-label", label);
}

function settle(box, chosen) {
  for (const item of box.querySelectorAll("[data-item]")) item.tabIndex = item === chosen ? 0 : -1;
}
