// How one weight comes: query and key dimension by dimension, the softmax of the row, the values that are mixed.

const sum = { head: -1, query: 0, key: 0 };

function drawSum(head) {
  const inner = vectors.get(head.index);
  byId("sum-tools").hidden = !inner;
  if (!inner) {
    byId("sum").replaceChildren(el("p", { className: "hint" }, whyNoSum()));
    byId("sum-other").textContent = "";
    return;
  }
  const { call } = inner;
  const source = tokenWeights(head, kept.weight);
  const whole = head.rows === head.queries && head.columns === head.keys;
  if (whole && state.query < call.queries) sum.query = state.query;
  else if (sum.head !== head.index) sum.query = tellingAmong(source, call);
  sum.query = Math.min(sum.query, call.queries - 1);
  sum.head = head.index;
  if (whole && state.key !== null && state.key < call.keys) sum.key = state.key;
  else sum.key = strongestOf(source, sum.query, call.keys);
  fillSum(head, inner, source);
}

function whyNoSum() {
  if (look.vectors.groups.length) return `The page has room for the vectors of ${look.vectors.groups.length} groups of heads, those of the strongest roles; this head is not among them.`;
  return "This look carries no queries, keys and values.";
}

// Of the first tokens the query with the strongest weight on a key that is not the first, nor itself.
function tellingAmong(source, { queries, keys }) {
  let [best, query] = [-1, queries - 1];
  for (let i = Math.floor(queries / 3); i < queries; i++) {
    for (let j = 1; j < keys; j++) if (i !== j && source.weight(i, j) > best) [best, query] = [source.weight(i, j), i];
  }
  return query;
}

function strongestOf(source, query, keys) {
  let best = 0;
  for (let j = 1; j < keys; j++) if (source.weight(query, j) > source.weight(query, best)) best = j;
  return best;
}

function buildSum() {
  for (const [id, name] of [["sum-query", "query"], ["sum-key", "key"]]) {
    byId(id).addEventListener("change", (event) => chooseSum({ [name]: Number(event.target.value) }));
  }
}

// Another query or key; where the map shows the same tokens it goes along.
function chooseSum(change) {
  const head = heads[state.head];
  const inner = vectors.get(head.index);
  const source = tokenWeights(head, kept.weight);
  Object.assign(sum, change);
  if (change.query !== undefined) sum.key = strongestOf(source, sum.query, inner.call.keys);
  if (head.rows === head.queries && head.columns === head.keys) selectQuery(sum.query, sum.key);
  else fillSum(head, inner, source);
}

function moveInSum(event) {
  const moves = { ArrowUp: ["query", -1], ArrowDown: ["query", 1], ArrowLeft: ["key", -1], ArrowRight: ["key", 1] };
  const inner = vectors.get(state.head);
  const move = moves[event.key];
  if (!move || !inner || event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const [name, step] = move;
  const size = name === "query" ? inner.call.queries : inner.call.keys;
  chooseSum({ [name]: Math.min(Math.max(sum[name] + step, 0), size - 1) });
}

const dot = (a, b) => a.reduce((total, value, d) => total + value * b[d], 0);

// The score of a query and a key as the model has it, but for what its mask adds.
function scoreOfPair(inner, query, key) {
  const { scale, softcap } = inner.call;
  const scaled = scale * dot(inner.query(query), inner.key(key));
  return softcap === null ? scaled : softcap * Math.tanh(scaled / softcap);
}

function fillSum(head, inner, source) {
  const { call } = inner;
  const options = (size, name) => Array.from({ length: size }, (_, i) => el("option", { value: i }, `${i} ${name(i, 20)}`));
  byId("sum-query").replaceChildren(...options(call.queries, source.queryName));
  byId("sum-key").replaceChildren(...options(call.keys, source.keyName));
  const follows = head.rows === head.queries && head.columns === head.keys;
  byId("sum-other").textContent = !follows ? "A row of the map stands for several queries; this is one of them." : state.query === sum.query ? "" : `Another query than that of the map and the text: the report keeps these numbers of the first ${plural(call.queries, "query").replace("querys", "queries")} only.`;
  byId("sum-query").value = String(sum.query);
  byId("sum-key").value = String(sum.key);
  byId("sum").replaceChildren(productPart(inner, source), softmaxPart(inner, source), valuePart(inner, source));
}

function productPart(inner, source) {
  const { call } = inner;
  const [q, k] = [inner.query(sum.query), inner.key(sum.key)];
  const products = q.map((value, d) => value * k[d]);
  const total = dot(q, k);
  const part = el("section", {}, el("h4", {}, "1 \u00b7 The score: query times key, dimension by dimension"));
  const readout = el("p", { className: "hint dim" });
  const say = (d) => {
    readout.textContent =
      d === null ? `${plural(call.dims, "dimension")}; point at one` : `dimension ${d}: ${number(q[d], 2)} \u00d7 ${number(k[d], 2)} = ${number(products[d], 2)}`;
  };
  part.append(
    strip("q", `query ${source.queryName(sum.query)}`, q, say),
    strip("k", `key ${source.keyName(sum.key)}`, k, say),
    strip("q\u00d7k", "their product", products, say),
    bars(products),
    readout,
  );
  const scaled = call.scale * total;
  const said = [`sum ${number(total, 2)} \u00d7 scale ${number(call.scale, 4)} = `, el("b", {}, number(scaled, 2))];
  if (call.softcap !== null) said.push(` \u2192 softcap ${number(call.softcap, 0)}: `, el("b", {}, number(scoreOfPair(inner, sum.query, sum.key), 2)));
  if (call.biased) said.push("; the mask adds a bias by position, which is not in these products");
  part.append(el("p", { className: "equation" }, ...said));
  say(null);
  return part;
}

// The weights of the row, a bar a key, over the scores that they come from.
function softmaxPart(inner, source) {
  const { call } = inner;
  const weights = Array.from({ length: call.keys }, (_, j) => source.weight(sum.query, j));
  const allowed = weights.map((weight, j) => weight > 0 || !source.same || j <= sum.query);
  const scores = weights.map((_, j) => (allowed[j] ? scoreOfPair(inner, sum.query, j) : null));
  const part = el("section", {}, el("h4", {}, "2 \u00b7 The softmax of the row"));
  const width = Math.max(byId("sum").clientWidth - 4, 260);
  const [height, base] = [110, 62];
  const x = d3.scaleBand(scores.map((_, j) => j), [0, width]).padding(0.15);
  const y = d3.scaleLinear([0, Math.max(...weights, 0.05)], [base, 4]);
  const known = scores.filter((score) => score !== null);
  const far = Math.max(...known.map(Math.abs), 1e-9);
  const svg = drawing(width, height).attr("class", "row-of");
  weights.forEach((weight, j) => {
    if (scores[j] === null) return;
    const bar = svg.append("g").attr("class", j === sum.key ? "key-bar now" : "key-bar").attr("data-key", j).on("click", () => chooseSum({ key: j }));
    bar.append("rect").attr("class", "hit").attr("x", x(j)).attr("y", 0).attr("width", x.bandwidth()).attr("height", height);
    bar.append("rect").attr("class", "weight").attr("x", x(j)).attr("y", y(weight)).attr("width", x.bandwidth()).attr("height", base - y(weight));
    const size = (20 * Math.abs(scores[j])) / far;
    bar.append("rect").attr("class", scores[j] < 0 ? "minus" : "plus").attr("x", x(j)).attr("y", scores[j] < 0 ? 88 : 88 - size).attr("width", x.bandwidth()).attr("height", size);
    bar.append("title").text(`${j} ${source.keyName(j)}: score ${number(scores[j], 2)}, weight ${number(weight, 3)}`);
  });
  svg.append("path").attr("class", "domain").attr("d", `M0,${base + 0.5}H${width}M0,88.5H${width}`);
  part.append(svg.node());
  const chosen = weights[sum.key];
  const rest = 1 - weights.reduce((a, b) => a + b, 0);
  const said = ["above: weights; below: scores. exp(", number(scores[sum.key], 2), ") over the sum of all = ", el("b", {}, number(chosen, 3))];
  if (call.sunk) said.push("; a sink takes part of the row");
  else if (rest > 0.02) said.push(`; ${number(rest, 2)} lies on keys that are not shown`);
  part.append(el("p", { className: "equation" }, ...said));
  return part;
}

const MIXED = 6; // values shown one by one

function valuePart(inner, source) {
  const part = el("section", {}, el("h4", {}, "3 \u00b7 The values, mixed by the weights"));
  if (!inner.value) {
    part.append(el("p", { className: "hint" }, "The call showed no values."));
    return part;
  }
  const weights = Array.from({ length: inner.call.keys }, (_, j) => source.weight(sum.query, j));
  const order = weights.map((_, j) => j).sort((a, b) => weights[b] - weights[a] || a - b);
  const shown = order.slice(0, MIXED).filter((j) => weights[j] > 0.005);
  const out = new Array(inner.call.value).fill(0);
  const scaled = new Map();
  weights.forEach((weight, j) => {
    if (!weight) return;
    const value = inner.value(j).map((number) => number * weight);
    value.forEach((number, d) => (out[d] += number));
    scaled.set(j, value);
  });
  const most = Math.max(...[...shown.map((j) => scaled.get(j)), out].flat().map(Math.abs), 1e-9);
  for (const j of shown) part.append(strip(number(weights[j], 2), `\u00d7 value ${source.keyName(j)}`, scaled.get(j), null, most));
  part.append(strip("sum", inner.call.gated ? "before its gate" : "the output", out, null, most));
  return part;
}

// --- vectors as colours ------------------------------------------------------------------------------------------------

// A row of cells, a dimension each: orange above 0, blue below, clear at 0; the same in light and dark.
function strip(label, about, values, say, most = Math.max(...values.map(Math.abs), 1e-9)) {
  const canvas = el("canvas", { width: values.length, height: 1 });
  const context = canvas.getContext("2d");
  const image = context.createImageData(values.length, 1);
  values.forEach((value, d) => image.data.set([...(value < 0 ? [0, 114, 178] : [213, 94, 0]), Math.round((255 * Math.abs(value)) / most)], 4 * d));
  context.putImageData(image, 0, 0);
  const row = el("div", { className: "strip" }, el("b", {}, label), el("span", { className: "who", title: about }, about), canvas);
  if (say) {
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      say(Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * values.length), 0), values.length - 1));
    });
    canvas.addEventListener("pointerleave", () => say(null));
  }
  return row;
}

function bars(values) {
  const most = Math.max(...values.map(Math.abs), 1e-9);
  const svg = drawing("100%", 44).attr("viewBox", `0 0 ${values.length} 44`).attr("preserveAspectRatio", "none").attr("class", "bars");
  values.forEach((value, d) => {
    const size = (21 * Math.abs(value)) / most;
    svg.append("rect").attr("class", value < 0 ? "minus" : "plus").attr("x", d + 0.1).attr("width", 0.8).attr("y", value < 0 ? 22 : 22 - size).attr("height", size);
  });
  return el("div", { className: "strip" }, el("b"), el("span", { className: "who" }), svg.node());
}
