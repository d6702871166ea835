// The roles of the open head with their evidence, and all its other scores.

const excerpts = new Map(look.excerpts.map(([name, tokens]) => [name, new Map(tokens)]));

function drawEvidence(head) {
  const others = head.scores.filter((score) => !head.roles.some(({ role }) => role === score.role));
  others.sort((a, b) => b.value / b.threshold - a.value / a.threshold);
  const none = el("li", {}, "Has none of the measured roles.");
  byId("played").replaceChildren(...(head.roles.length ? head.roles.map((score) => played(score, head)) : [none]));
  byId("others").replaceChildren(...others.map(otherScore));
  byId("others-title").textContent = `${plural(others.length, "other score")}, the nearest to its threshold first`;
  byId("not-played").hidden = !others.length;
}

// One role, spelt out: value against threshold and chance, definition, source, and the queries that show it best.
function played(score, head) {
  const { label, plain, formula, source, control } = look.roles[score.role];
  const title = el("h4", {}, el("i", {}, signOf(score.role)), plainText(label, 60), score.detail ? el("span", { className: "of" }, plainText(score.detail, 60)) : "");
  const item = el("li", {}, title, ...(plain ? [el("p", {}, plain)] : []), bullet(score), measured(score));
  item.style.setProperty("--role", roleColour(score.role));
  item.style.setProperty("--on", roleInk(score.role));
  const said = [formula, source, control && `Chance: ${control}.`].filter(Boolean).map((part) => plainText(part, 500));
  if (said.length) item.append(el("p", { className: "hint" }, said.join(" \u2014 ")));
  if (score.evidence.length) item.append(el("ul", { className: "evidence" }, ...score.evidence.map((one) => piece(one, score.role, head))));
  return item;
}

function measured({ value, low, high, threshold, chance, count }) {
  const parts = [el("b", {}, number(value, 3))];
  if (low !== null && high !== null) parts.push(` (95 %: ${number(low, 3)} to ${number(high, 3)})`);
  parts.push(` \u00b7 threshold ${number(threshold, 2)}`);
  if (chance !== null) parts.push(` \u00b7 chance ${number(chance, 3)}`);
  if (count !== null) parts.push(` \u00b7 ${count === 1 ? "1 query" : `${count.toLocaleString("en")} queries`}`);
  return el("p", { className: "measured" }, ...parts);
}

// A bar from 0 to 1: the value, its interval, the threshold as a line, chance as a dotted one.
function bullet({ value, low, high, threshold, chance }, width = 220) {
  const svg = drawing(width, 16).attr("class", "bullet").attr("aria-hidden", "true");
  const x = d3.scaleLinear([0, 1], [1, width - 1]);
  const at = (share) => x(Math.min(Math.max(share, 0), 1));
  svg.append("rect").attr("class", "track").attr("x", 0).attr("y", 4).attr("width", width).attr("height", 8).attr("rx", 2);
  svg.append("rect").attr("class", "filled").attr("x", 0).attr("y", 4).attr("width", at(value)).attr("height", 8).attr("rx", 2);
  if (low !== null && high !== null) svg.append("path").attr("class", "interval").attr("d", `M${at(low)},5v6m0,-3H${at(high)}m0,-3v6`);
  if (chance !== null) svg.append("path").attr("class", "chance").attr("d", `M${at(chance)},1v14`);
  svg.append("path").attr("class", "threshold").attr("d", `M${at(threshold)},1v14`);
  return svg.node();
}

function otherScore(score) {
  const { label } = look.roles[score.role];
  const row = el("tr", {}, el("th", { scope: "row" }, el("i", {}, signOf(score.role)), plainText(label, 40)));
  row.style.setProperty("--role", roleColour(score.role));
  row.style.setProperty("--on", roleInk(score.role));
  const numbers = [number(score.value, 3), number(score.threshold, 2), number(score.chance, 3)];
  numbers.push(score.low === null ? "\u2013" : `${number(score.low, 2)}\u2013${number(score.high, 2)}`);
  numbers.push(score.count === null ? "\u2013" : score.count.toLocaleString("en"));
  row.append(el("td", {}, bullet(score, 90)), ...numbers.map((text) => el("td", {}, text)));
  return row;
}

// A query whose largest weight lies where the role says, each token in its context.
function piece([textNumber, query, key, weight], role, head) {
  const { reads } = look.roles[role];
  const own = reads === "text" && look.texts === 1 && textNumber === 0;
  const tokens = excerpts.get(`${reads} ${textNumber}`);
  // A decoder beside an encoder reads the same tokens behind its start: each stands one place later there.
  const behind = look.kind === "encoder-decoder" && head.part !== "encoder";
  const textOf = (side, late) => (own ? (place) => axisText(place, side) : (place) => tokens?.get(place - late) ?? null);
  const queryText = textOf(head.sides[0], Number(behind));
  const keyText = textOf(head.sides[1], Number(behind && head.part !== "cross"));
  const where = own ? "" : { copies: `random tokens, row ${textNumber}: `, text: `text ${textNumber}: ` }[reads] ?? `${plainText(reads, 20)} ${textNumber}: `;
  const line = el("li", {}, el("span", { className: "where" }, where, `query ${query} \u2192 key ${key} `), el("b", {}, number(weight, 2)));
  if (own && head.moves && head.rows === head.queries && head.columns === head.keys) line.append(" of the weight, ", el("b", {}, number(weightAt(head, query, key, kept.moved), 2)), " of what it moves");
  if (own && overText(head)) {
    const open = el("button", { type: "button", className: "link" }, "show");
    open.addEventListener("click", () => openCell(head, query, key));
    line.append(" ", open);
  }
  const [at, from] = [queryText(query) !== null, keyText(key) !== null];
  if (at && from && head.queries === head.keys && head.sides[0].axis === head.sides[1].axis) line.append(el("div", { className: "context" }, ...context(query, key, queryText, reads === "copies")));
  else {
    if (at) line.append(el("div", { className: "context" }, ...context(query, null, queryText, reads === "copies")));
    if (from) line.append(el("div", { className: "context" }, ...context(null, key, keyText, reads === "copies")));
  }
  if (line.textContent.includes("\ufffd")) line.append(el("div", { className: "hint" }, "\ufffd stands for a token that is only a part of a character."));
  return line;
}

const BESIDE = 5;

// The tokens around a query and a key of one text, or around one of them; random ones, which make no words, in quotes.
function context(query, key, textOf, quoted) {
  const [first, last] = [Math.min(query ?? key, key ?? query), Math.max(query ?? key, key ?? query)];
  const places = [];
  for (let i = first - BESIDE; i <= last + BESIDE; i++) if (i <= first + BESIDE || i >= last - BESIDE) places.push(i);
  const nodes = [];
  let before = null;
  for (const place of places) {
    const text = place < 0 ? null : textOf(place);
    if (text === null) continue;
    if (before !== null && place !== before + 1) nodes.push(el("span", { className: "gap" }, " \u2026 "));
    const kind = place === query ? (place === key ? "is-query is-key" : "is-query") : place === key ? "is-key" : "";
    const node = el(kind ? "mark" : "span", { className: kind });
    appendText(node, text);
    nodes.push(...(quoted ? ["\u201c", node, "\u201d "] : [node]));
    before = place;
  }
  return nodes;
}

// Opens the map on the cell that holds a query and a key, given as tokens.
function openCell(head, query, key) {
  const cell = (place, size, total) => Math.floor((place * size) / total);
  choosePane("map");
  selectQuery(cell(query, head.rows, head.queries || look.length), cell(key, head.columns, head.keys || look.length));
  byId("map").scrollIntoView({ block: "nearest" });
}
