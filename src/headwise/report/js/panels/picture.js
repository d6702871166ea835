// What a query attends, laid over the patches of the picture, or over the time of the sound.

const scene = { mode: "attends", marks: [] };

function buildPicture() {
  byId("tab-picture").hidden = !look.axes.some(isSeen);
  byId("tab-picture").textContent = look.pictures.length && look.pictures.every((one) => one.kind === "sound") ? "Sound" : "Picture";
  byId("scene-mode").addEventListener("change", (event) => {
    scene.mode = event.target.value;
    drawPicture(heads[state.head]);
  });
  byId("scene").addEventListener("keydown", moveInPicture);
  byId("scene-query").addEventListener("change", (event) => selectQuery(Number(event.target.value)));
}

// Does an axis run over patches that are known, or over the frames of a sound?
function isSeen(axis) {
  return Boolean(axis) && (axis.at.length > 0 || axis.kind === "sound");
}

function onPicture(head) {
  return head.sides.some((side) => isSeen(side.axis));
}

// The frames of a sound as a grid of one row; else the grids of the axis.
function gridsOf(side) {
  return side.axis.kind === "sound" ? [[1, side.total]] : side.axis.grids;
}

function patchOf(side, place) {
  return side.axis.kind === "sound" ? [0, 0, place] : patchAt(side.axis, place);
}

// The cell of a side that holds a place.
function cellAt(side, place) {
  return Math.floor((place * side.size) / side.total);
}

// By place of the side that is shown: the weight that the query gives it, or it gives the query, or all queries' mean.
function heatOf(head, query) {
  const late = scene.mode === "attended";
  const side = head.sides[late ? 0 : 1];
  const weight = {
    attends: (cell) => weightAt(head, query, cell),
    attended: (cell) => weightAt(head, cell, query),
    mean: (cell) => {
      let total = 0;
      for (let row = 0; row < head.rows; row++) total += weightAt(head, row, cell);
      return total / head.rows;
    },
  }[scene.mode];
  const heat = new Float64Array(side.total);
  for (let cell = 0; cell < side.size; cell++) {
    const { start, count } = cellOf(cell, side);
    const share = weight(cell) / (late ? 1 : Math.max(count, 1));
    for (let place = start; place < start + count; place++) heat[place] = share;
  }
  return { side, heat };
}

function drawPicture(head) {
  const view = byId("scene");
  const seen = onPicture(head);
  byId("scene-tools").hidden = !seen;
  byId("scene-readout").replaceChildren();
  byId("scene-apart").replaceChildren();
  if (!seen) {
    view.replaceChildren(el("p", { className: "hint" }, "This head does not run over a picture or a sound."));
    return;
  }
  const { side, heat } = heatOf(head, scene.mode === "attended" ? cellOfQuery(head, 1) : state.query);
  const other = head.sides[scene.mode === "attended" ? 1 : 0];
  const shown = isSeen(side.axis) ? side : other;
  const mapped = shown === side;
  fillSceneQuery(head);
  scene.marks = [];
  const most = mapped ? patchMost(side, heat) : 0;
  const panels = gridsOf(shown).map((grid, n) => panel(head, shown, grid, n, mapped ? heat : null, most));
  view.replaceChildren(...panels);
  drawLegendOf(most);
  placeMarks(head);
  sayPicture(head, side, heat, mapped);
  listApart(head, side, heat);
}

// Queries that are no patches and no frames, as of a decoder that reads a text, are chosen by name.
function fillSceneQuery(head) {
  const [queries] = head.sides;
  byId("scene-query-label").hidden = isSeen(queries.axis) || scene.mode === "mean";
  if (byId("scene-query-label").hidden) return;
  byId("scene-query").replaceChildren(...d3range(head.rows).map((row) => el("option", { value: row }, cellSentence(row, queries))));
  byId("scene-query").value = String(state.query);
}

// Where queries and keys are of one axis, the key that is the query; else the key that is open.
function cellOfQuery(head, which) {
  if (head.sides[0].axis === head.sides[1].axis) return Math.min(state.query, head.columns - 1);
  return state.key ?? strongestKey(head, state.query);
}

function patchMost(side, heat) {
  let most = 0;
  for (let place = 0; place < side.total; place++) if (patchOf(side, place)) most = Math.max(most, heat[place]);
  return most;
}

// One picture with its patches tinted; a click on a patch makes it the query, where queries run over the picture.
function panel(head, side, [rows, columns], n, heat, most) {
  const behind = look.pictures[n] ?? look.pictures[0];
  const flat = side.axis.kind === "sound";
  const box = el("div", { className: flat || behind?.kind === "sound" ? "panel-of sound" : "panel-of" });
  if (behind) box.append(el("img", { src: `data:image/png;base64,${behind.data}`, alt: behind.kind === "sound" ? "the sound as a spectrogram" : "the picture" }));
  else box.classList.add("blank");
  if (!flat && !behind) box.style.setProperty("aspect-ratio", `${columns} / ${rows}`);
  const canvas = el("canvas", { width: columns, height: rows, className: "heat" });
  const image = canvas.getContext("2d").createImageData(columns, rows);
  if (heat) {
    for (let place = 0; place < side.total; place++) {
      const patch = patchOf(side, place);
      if (!patch || patch[0] !== n) continue;
      const share = most ? heat[place] / most : 0;
      const colour = 3 * Math.round(255 * share);
      image.data.set([RAMP[colour], RAMP[colour + 1], RAMP[colour + 2], 70 + 160 * share], 4 * (patch[1] * columns + patch[2]));
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
  const mark = el("i", { className: "patch-mark" });
  box.append(canvas, mark);
  scene.marks.push({ mark, rows, columns });
  const at = (event) => {
    const space = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - space.top) / space.height) * rows);
    const column = Math.floor(((event.clientX - space.left) / space.width) * columns);
    return placeAt(side, n, Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1));
  };
  canvas.addEventListener("click", (event) => choosePlace(head, at(event)));
  canvas.addEventListener("pointermove", (event) => {
    const place = at(event);
    if (heat && place >= 0) canvas.title = `${axisName(place, side)}: ${number(heat[place], 4)}`;
  });
  if (!flat && behind?.kind !== "sound") return box;
  const seconds = heard?.seconds ? `${number(heard.seconds, 2)} s` : plural(columns, "frame");
  return el("div", { className: "timed" }, box, el("p", { className: "hint times" }, el("span", {}, "0"), el("span", {}, seconds)));
}

function placeAt(side, n, row, column) {
  if (side.axis.kind === "sound") return column;
  for (let place = 0; place < side.total; place++) {
    const patch = patchAt(side.axis, place);
    if (patch && patch[0] === n && patch[1] === row && patch[2] === column) return place;
  }
  return -1;
}

// A place becomes the query; of a head whose queries are elsewhere (text on a sound), the key.
function choosePlace(head, place) {
  if (place < 0) return;
  const [queries, keys] = head.sides;
  if (isSeen(queries.axis)) selectQuery(cellAt(queries, place));
  else selectQuery(state.query, cellAt(keys, place));
}

function placeMarks(head) {
  const [queries] = head.sides;
  for (const { mark } of scene.marks) mark.hidden = true;
  if (!isSeen(queries.axis) || scene.mode === "mean") return;
  const patch = patchOf(queries, cellOf(state.query, queries).start);
  const at = patch && scene.marks[patch[0]];
  if (!at) return;
  at.mark.hidden = false;
  const share = (value, of) => `${(100 * value) / of}%`;
  at.mark.style.setProperty("left", share(patch[2], at.columns));
  at.mark.style.setProperty("top", share(patch[1], at.rows));
  at.mark.style.setProperty("width", share(1, at.columns));
  at.mark.style.setProperty("height", share(1, at.rows));
}

function sayPicture(head, side, heat, mapped) {
  let [mass, best] = [0, -1];
  for (let place = 0; place < side.total; place++) {
    if (!isSeen(side.axis) || !patchOf(side, place)) continue;
    mass += heat[place];
    if (best < 0 || heat[place] > heat[best]) best = place;
  }
  const query = el("bdi", {}, cellSentence(state.query, head.sides[0]));
  const lead = { attends: ["query ", query], attended: ["key ", query, " gets from"], mean: ["the mean of all queries"] }[scene.mode];
  if (!mapped || best < 0) return byId("scene-readout").replaceChildren(...lead);
  const what = side.axis.kind === "sound" ? "frames" : "patches";
  const total = scene.mode === "attended" ? [] : [` \u00b7 on the ${what} `, el("b", {}, number(Math.min(mass, 1), 2))];
  byId("scene-readout").replaceChildren(...lead, ...total, " \u00b7 most on ", el("bdi", {}, axisName(best, side)), " ", el("b", {}, number(heat[best], 3)));
}

// The tokens that are no patches: what they get, and a click to see what they attend.
function listApart(head, side, heat) {
  const items = [];
  const own = side.axis ? Object.values(side.axis.apart).flat() : [];
  for (const place of own.slice(0, 24)) {
    const button = el("button", { type: "button", className: "link" }, axisName(place, side), el("b", {}, ` ${number(heat[place], 3)}`));
    button.addEventListener("click", () => isSeen(head.sides[0].axis) && selectQuery(cellAt(head.sides[0], place)));
    items.push(el("li", {}, button));
  }
  byId("scene-apart").replaceChildren(...items);
}

function drawLegendOf(most) {
  byId("scene-legend").replaceChildren(el("span", {}, "0"), ramp(), el("span", {}, number(most, 3)));
}

function moveInPicture(event) {
  const head = heads[state.head];
  const [queries] = head.sides;
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!step || !isSeen(queries.axis) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const patch = patchOf(queries, cellOf(state.query, queries).start) ?? [0, 0, 0];
  const [rows, columns] = gridsOf(queries)[patch[0]];
  const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
  choosePlace(head, placeAt(queries, patch[0], clamp(patch[1] + step[0], rows), clamp(patch[2] + step[1], columns)));
}
