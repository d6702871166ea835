// A matrix of heads: a row a layer, a column a head.

// `heads` begin with layer and head; `cellOf` makes the cell of one. Rows share at most `part` of the window's height.
function fillMatrix(grid, width, heads, cellOf, part = 0.62) {
  grid.style.setProperty("--heads", Math.max(width, 1));
  const layers = new Map();
  for (const head of heads) layers.set(head[0], [...(layers.get(head[0]) ?? []), head]);
  const height = Math.min(30, (part * window.innerHeight) / Math.max(layers.size, 1) - 2);
  grid.style.setProperty("--h", `${Math.max(4, height).toFixed(1)}px`);
  const step = Math.ceil(11 / (height + 2)); // every so many layers are named, so that their numbers do not touch
  const top = el("div", { className: "line" }, el("span"));
  const apart = width > 24 ? 4 : 1;
  for (let head = 0; head < width; head++) top.append(el("span", {}, head % apart ? "" : String(head)));
  grid.append(top);
  let row = 0;
  for (const [layer, members] of layers) {
    const line = el("div", { className: "line" }, el("span", {}, row % step ? "" : String(layer)));
    for (const head of members) line.append(cellOf(head));
    grid.append(line);
    row += 1;
  }
}
