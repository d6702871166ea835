// Attention as arcs between the tokens of a sentence: from the query down to the key, as thick as the weight.

const arcs = { sentence: 0, least: 0.05, token: null, own: false };
const ARC_FONT = 12;
const LONGEST = 40; // tokens drawn at once
const SMALLEST = 0.7; // a long line is drawn smaller, down to this scale, and parted beyond it

function buildArcs() {
  byId("sentence").addEventListener("change", (event) => {
    arcs.sentence = Number(event.target.value);
    arcs.token = null;
    drawArcs(heads[state.head]);
  });
  for (const [id, step] of [["sentence-before", -1], ["sentence-after", 1]]) {
    byId(id).addEventListener("click", () => {
      const size = byId("sentence").options.length;
      arcs.sentence = Math.min(Math.max(arcs.sentence + step, 0), size - 1);
      arcs.token = null;
      drawArcs(heads[state.head]);
    });
  }
  byId("least").addEventListener("change", (event) => {
    arcs.least = Number(event.target.value);
    drawArcs(heads[state.head]);
  });
}

// Ranges [first, end) of tokens: a sentence ends after . ! ? or a line end, blanks that follow included; those
// too long for the line are parted.
function sentencesOf({ queries: size, queryText, queryName }) {
  const room = arcRoom() / SMALLEST;
  const widths = textWidths(d3range(size).map((i) => queryName(i, 16)));
  const ranges = [];
  let [first, width] = [0, 20];
  for (let i = 0; i < size; i++) {
    width += widths[i] + 9;
    const full = i + 1 < size && width + widths[i + 1] + 9 > room;
    const ends = /[.!?\n]["')\]]?\s*$/.test(queryText(i) ?? "") && !/^\s+$/.test(i + 1 < size ? (queryText(i + 1) ?? "") : "");
    if (ends || full || i - first + 1 === LONGEST || i === size - 1) {
      ranges.push([first, i + 1]);
      [first, width] = [i + 1, 20];
    }
  }
  return ranges;
}

function arcRoom() {
  return Math.max(byId("detail").clientWidth - 46, 240); // the pane itself has no width while it is hidden
}

// Draws to scale: as large as the text elsewhere, or as small as the panel needs.
function arcDrawing(width, height) {
  const scale = Math.min(1, arcRoom() / width);
  return drawing(width * scale, height * scale).attr("viewBox", `0 0 ${width} ${height}`);
}

function sentenceTitle([first, end], source) {
  const parts = [];
  for (let i = first; i < end && parts.join("").length < 48; i++) parts.push(source.queryName(i, 24).replace(/^\u00b7/, " "));
  return `${first}\u2013${end - 1}: ${parts.join("").trim()}`;
}

function drawArcs(head) {
  const place = byId("arcs");
  const source = tokenWeights(head);
  byId("arc-tools").hidden = !source;
  if (!source) {
    place.replaceChildren(el("p", { className: "hint" }, whyNoTokens()));
    byId("arc-readout").textContent = "";
    return;
  }
  const ranges = sentencesOf(source);
  arcs.sentence = Math.min(arcs.sentence, ranges.length - 1);
  byId("sentence").replaceChildren(...ranges.map((range, i) => el("option", { value: i }, sentenceTitle(range, source))));
  byId("sentence").value = String(arcs.sentence);
  byId("sentence-before").disabled = arcs.sentence === 0;
  byId("sentence-after").disabled = arcs.sentence === ranges.length - 1;
  const [first, end] = ranges[arcs.sentence];
  place.replaceChildren(source.same ? arcsWithin(head, source, first, end) : arcsAcross(head, source, first, end));
  sayArcs(source, strongLinks(source, [first, end], [0, source.keys]).filter(([, key]) => source.same && (key < first || key >= end)).length);
}

// The sentence that holds a token comes into view.
function showSentence(token, source) {
  if (token >= source.queries) return;
  const at = sentencesOf(source).findIndex(([first, end]) => token >= first && token < end);
  if (at >= 0) arcs.sentence = at;
  arcs.token = token;
}

// The sentence of the query that is open on the map.
function toSentence(head) {
  const source = tokenWeights(head);
  if (!source || source.queries !== head.rows) return;
  showSentence(state.query, source);
}

function textWidths(names) {
  const context = el("canvas").getContext("2d");
  context.font = `${ARC_FONT}px ${getComputedStyle(document.documentElement).getPropertyValue("--mono")}`;
  return names.map((name) => context.measureText(name).width);
}

// The tokens on one line; arcs to earlier keys above it, to later ones below, a drop for the own token.
function arcsWithin(head, source, first, end) {
  const names = [];
  for (let i = first; i < end; i++) names.push(source.queryName(i, 16));
  const widths = textWidths(names);
  const centres = [];
  let x = 10;
  for (const width of widths) {
    centres.push(x + width / 2);
    x += width + 9;
  }
  const links = linksToDraw(source, [first, end], [first, end]);
  const reach = (side) => Math.max(0, ...links.filter(([i, j]) => (side > 0 ? j <= i : j > i)).map(([i, j]) => Math.abs(centres[i - first] - centres[j - first])));
  const up = Math.min(Math.max(30, reach(1) / 2.6), 230);
  const down = reach(-1) ? Math.min(Math.max(24, reach(-1) / 2.6), 230) : 0;
  const base = up + 14;
  const svg = arcDrawing(Math.max(x + 6, 60), base + 24 + down);
  for (const [i, j, weight] of links) {
    const [from, to] = [centres[i - first], centres[j - first]];
    const above = j <= i;
    const y = above ? base - 5 : base + 15;
    const height = Math.max(12, ((above ? up : down) * Math.abs(from - to)) / Math.max(above ? reach(1) : reach(-1), 1));
    const bend = above ? y - height * 1.3 : y + height * 1.3;
    const path = i === j ? `M${from - 3},${y}C${from - 9},${y - 20} ${from + 9},${y - 20} ${from + 3},${y}` : `M${from},${y}C${from},${bend} ${to},${bend} ${to},${y}`;
    arc(svg, path, i, j, weight, source);
  }
  names.forEach((name, n) => word(svg, name, centres[n], base + 8, widths[n], first + n, head, source));
  return svg.node();
}

// Cross-attention: keys above, the sentence's queries below.
function arcsAcross(head, source, first, end) {
  const line = (from, to, name) => {
    const names = [];
    for (let i = from; i < to; i++) names.push(name(i, 12));
    let x = 10;
    const widths = textWidths(names);
    const centres = widths.map((width) => (x += width + 9) - 9 - width / 2);
    return { names, widths, centres, width: x };
  };
  const keys = line(0, Math.min(source.keys, LONGEST), source.keyName);
  const queries = line(first, end, source.queryName);
  const svg = arcDrawing(Math.max(keys.width, queries.width, 60), 190);
  for (const [i, j, weight] of linksToDraw(source, [first, end], [0, keys.names.length])) {
    arc(svg, `M${queries.centres[i - first]},160C${queries.centres[i - first]},90 ${keys.centres[j]},100 ${keys.centres[j]},26`, i, j, weight, source);
  }
  keys.names.forEach((name, j) => svg.append("text").attr("x", keys.centres[j]).attr("y", 18).attr("text-anchor", "middle").attr("class", "arc-key").text(name));
  queries.names.forEach((name, n) => word(svg, name, queries.centres[n], 175, queries.widths[n], first + n, head, source));
  return svg.node();
}

function strongLinks(source, [first, end], [left, right]) {
  const links = [];
  for (let i = first; i < end; i++) {
    for (let j = left; j < right; j++) {
      const weight = source.weight(i, j);
      if (weight >= arcs.least) links.push([i, j, weight]);
    }
  }
  return links.sort((a, b) => a[2] - b[2]);
}

function linksToDraw(source, queries, keys) {
  const links = strongLinks(source, queries, keys);
  arcs.own = links.some(([i, j]) => i === arcs.token || j === arcs.token); // else all arcs would be faint
  return links;
}

function arc(svg, path, i, j, weight, source) {
  const node = svg.append("path").attr("class", "arc").attr("d", path).attr("data-query", i).attr("data-key", j);
  node.attr("stroke-width", 0.8 + 3.2 * weight).attr("stroke-opacity", 0.35 + 0.6 * weight);
  node.classed("aside", arcs.own && arcs.token !== i && arcs.token !== j);
  node.classed("into", arcs.token !== null && arcs.token === j && arcs.token !== i);
  node.append("title").text(`${source.queryName(i)} \u2192 ${source.keyName(j)}: ${number(weight, 3)}`);
}

function word(svg, name, x, y, width, token, head, source) {
  const box = svg.append("g").attr("class", "word").attr("tabindex", arcs.token === token ? 0 : -1).attr("role", "button").attr("data-token", token);
  box.classed("chosen", arcs.token === token);
  box.append("rect").attr("x", x - width / 2 - 4).attr("y", y - 13).attr("width", width + 8).attr("height", 18).attr("rx", 3);
  box.append("text").attr("x", x).attr("y", y).attr("text-anchor", "middle").text(name);
  box.on("click", () => chooseWord(arcs.token === token ? null : token, head, source));
}

function chooseWord(token, head, source) {
  arcs.token = token;
  if (token !== null && overText(head) && head.rows === source.queries) selectQuery(token);
  else drawArcs(head);
}

function moveInArcs(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const head = heads[state.head];
  const source = tokenWeights(head);
  if (!source) return;
  const [first] = sentencesOf(source)[arcs.sentence];
  const next = arcs.token === null ? first : Math.min(Math.max(arcs.token + step, 0), source.queries - 1);
  showSentence(next, source);
  chooseWord(next, head, source);
}

// Says what the chosen word attends to, and how many arcs leave the sentence.
function sayArcs(source, outside) {
  const place = byId("arc-readout");
  const left = outside ? ` ${plural(outside, "arc")} to other sentences ${outside === 1 ? "is" : "are"} not drawn.` : "";
  if (arcs.token === null || arcs.token >= source.queries) {
    place.replaceChildren("Click a word, or walk with the arrow keys: its own arcs stand out.", left);
    return;
  }
  const keys = Array.from({ length: source.keys }, (_, j) => [source.weight(arcs.token, j), j]).sort((a, b) => b[0] - a[0]);
  const said = keys.slice(0, 3).filter(([weight]) => weight >= 0.005).flatMap(([weight, j], n) => [n ? ", " : "", el("bdi", {}, `${j} \u201c${source.keyName(j)}\u201d`), " ", el("b", {}, number(weight, 2))]);
  place.replaceChildren("query ", el("bdi", {}, `${arcs.token} \u201c${source.queryName(arcs.token)}\u201d`), source.moved ? " moves " : " attends ", ...(said.length ? said : ["none of these keys"]), ".", left);
}
