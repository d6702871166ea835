// Figures that several sections use.

const [BELOW, ABOVE] = [[0, 114, 178], [213, 94, 0]]; // colours of numbers below and above 0

// A row of cells, a dimension each: orange above 0, blue below, clear at 0; the same in light and dark.
function strip(label, about, values, most = largest(values)) {
  const canvas = el("canvas", { width: values.length, height: 1 });
  const context = canvas.getContext("2d");
  const image = context.createImageData(values.length, 1);
  values.forEach((value, d) => image.data.set([...(value < 0 ? BELOW : ABOVE), Math.round((255 * Math.abs(value)) / most)], 4 * d));
  context.putImageData(image, 0, 0);
  return el("div", { className: "strip" }, el("b", {}, label), el("span", { className: "who" }, about), canvas);
}

// Bars above and below a line, one for each number.
function signedBars(values) {
  const most = largest(values);
  const half = 22;
  const svg = drawing("100%", 2 * half).attr("viewBox", `0 0 ${values.length} ${2 * half}`).attr("preserveAspectRatio", "none").attr("aria-hidden", "true");
  values.forEach((value, d) => {
    const size = ((half - 1) * Math.abs(value)) / most;
    put(svg, "rect", { class: value < 0 ? "minus" : "plus", x: d + 0.1, width: 0.8, y: value < 0 ? half : half - size, height: size });
  });
  return el("div", { className: "strip" }, el("b"), el("span", { className: "who" }), svg.node());
}

// Horizontal bars with a name and a number each: [[name, value, text]].
function barList(rows, most = largest(rows.map(([, value]) => value))) {
  return el("ol", { className: "bars" }, ...rows.map(([name, value, text]) => {
    const bar = el("span", { className: value < 0 ? "bar-of less" : "bar-of" });
    bar.style.setProperty("--share", `${(100 * Math.min(Math.abs(value) / most, 1)).toFixed(1)}%`);
    return el("li", {}, el("bdi", { className: "who" }, name), bar, el("b", {}, text));
  }));
}

// A table of rows; the first cell of each is its heading.
function tableOf(head, rows, caption) {
  const line = (cells, tag) => el("tr", {}, ...cells.map((cell, n) => el(n && tag === "td" ? "td" : "th", { scope: tag === "th" ? "col" : "row" }, ...typeset(cell))));
  return el("table", {}, ...(caption ? [el("caption", {}, caption)] : []), el("thead", {}, line(head, "th")), el("tbody", {}, ...rows.map((row) => line(row, "td"))));
}

// The numbers of a figure, folded away.
function numbersOf(head, rows, caption = "The numbers of this figure") {
  return el("details", { className: "numbers" }, el("summary", {}, ...typeset(caption)), el("div", { className: "scroll" }, tableOf(head, rows)));
}

function fillLayers(id) {
  fill(id, ...range(model.L, (l) => el("option", { value: l }, `layer ${l}`)));
}

// A name for a token by its place.
function tokenName(place, limit = 16) {
  const piece = current.pieces[place];
  return piece ? plainText(piece.text, limit) : `#${place}`;
}

const tokenLabel = (place, limit) => `${place} \u201c${tokenName(place, limit)}\u201d`;

// The text as tokens; `tint(t)` gives { share, title } of token t.
function tokenBoxes(box, tint, pick) {
  if (box.pieces !== current.pieces) {
    box.pieces = current.pieces;
    box.replaceChildren(...box.pieces.map(({ text, hex }, t) => {
      const node = el("span", { className: hex ? "token bytes" : "token", "data-item": t, role: "option" });
      appendText(node, text);
      return node;
    }));
  }
  [...box.children].forEach((node, t) => {
    const { share, title, less } = tint(t);
    const chosen = t === state.query;
    node.title = title;
    node.setAttribute("aria-label", `${t} ${plainText(box.pieces[t].text, 24)}: ${title}`);
    node.ariaSelected = chosen;
    node.style.setProperty("--weight", `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(1)}%`);
    node.classList.toggle("less", Boolean(less));
    node.classList.toggle("chosen", chosen);
    node.tabIndex = chosen ? 0 : -1;
  });
  box.onclick = (event) => {
    const node = event.target.closest?.("[data-item]");
    if (node) pick(Number(node.dataset.item));
  };
}

// Lines over an axis of numbers. `lines`: [{ name, points: [[x, y]], colour }]; a line is broken where y is null.
function lineChart({ lines, x, y, label, xName, yName }) {
  const [width, height] = [560, 240];
  const [left, right, top, bottom] = [44, 24, 28, 44];
  const across = (x.log ? d3.scaleBand(x.values, [left, width - right]).padding(1) : d3.scaleLinear(x.range, [left, width - right]));
  const upward = d3.scaleLinear(y, [height - bottom, top]);
  const svg = picture(width, height, label);
  put(svg, "g", { class: "grid", transform: `translate(${left},0)` }).call(d3.axisLeft(upward).ticks(5).tickSize(left + right - width));
  const axis = d3.axisBottom(across).tickSize(3).tickPadding(5);
  if (!x.log) axis.ticks(6);
  put(svg, "g", { transform: `translate(0,${height - bottom})` }).call(axis);
  put(svg, "text", { class: "name", x: width - right, y: height - 4, "text-anchor": "end" }).text(xName);
  put(svg, "text", { class: "name", x: 4, y: 13 }).text(yName);
  lines.forEach(({ name, points, colour }) => {
    const places = points.map(([px, py]) => (py === null ? null : [across(px), upward(py)]));
    const path = places.map((p, n) => (p ? `${places[n - 1] ? "L" : "M"}${p.map((v) => v.toFixed(1)).join(",")}` : "")).join("");
    put(svg, "path", { class: "line", stroke: `var(--role-${colour})`, d: path });
    places.forEach((p, n) => p && put(svg, "circle", { class: "point", fill: `var(--role-${colour})`, cx: p[0], cy: p[1], r: 3 }).append("title").text(`${name}: ${points[n][0]}, ${points[n][1]}`));
  });
  return svg.node();
}

function keyOf(lines) {
  return el("p", { className: "key" }, ...lines.map(({ name, colour }) => {
    const mark = el("i");
    mark.style.setProperty("background", `var(--role-${colour})`);
    return el("span", {}, mark, ...typeset(name));
  }));
}
