// Puts it together.

function fillHeader() {
  document.title = `${plainText(look.model, 80)} \u00b7 headwise`;
  appendText(byId("model"), look.model);
  const shape = `${plural(look.layers, "layer")} \u00d7 ${plural(look.width, "head")}`;
  const facts = [shape, plainText(look.kind, 40), `${look.texts > 1 ? `${plural(look.texts, "text")}, ` : ""}${plural(look.length, "token")}`, `looked at in ${number(look.seconds, 1)} s`, `headwise ${plainText(look.version, 40)}`];
  const doing = look.pictures.length ? (heard ? "listens" : "sees the picture") : "reads";
  if (!look.cells.length || look.pictures.length) byId("what").textContent = `What each attention head of this model does while it ${doing}.`;
  byId("facts").replaceChildren(...facts.map((fact) => el("span", {}, fact)));
}

// Patches and frames are no tokens.
function inPlaces({ meaning }) {
  return { unit: "places", meaning: meaning.replace("in tokens", "in places: patches row after row, frames, tokens") };
}

function fillAbout() {
  if (look.pictures.length) look.statistics.forEach((s) => s.unit === "tokens" && Object.assign(s, inPlaces(s)));
  for (const s of look.statistics) if (s.role === null) byId("definitions").append(el("dt", {}, s.label), el("dd", {}, s.meaning));
  look.roles.forEach((role, i) => {
    const term = el("dt", {}, el("i", {}, signOf(i)), plainText(role.label, 60));
    term.style.setProperty("--role", roleColour(i));
    term.style.setProperty("--on", roleInk(i));
    const parts = [role.plain, role.formula, role.source, role.control && `chance: ${role.control}`].filter(Boolean).map((part) => plainText(part, 500));
    byId(role.played ? "sources" : "other-sources").append(term, ...parts.map((part) => el("dd", {}, part)));
  });
  byId("unplayed").hidden = look.roles.every((role) => role.played);
  const pooled = look.cells.some((cell) => cell.count > 1);
  byId("precision").textContent =
    `Weights in the maps are kept in ${kept.weight.levels} steps of their square root: 0.5 means 0.5 \u00b1 ${number(errorAt(0.5, kept.weight), 3)}. ` +
    "The numbers come from the full weights. Empty cells are forbidden by the mask. " +
    (look.numbers.complete ? "" : "There are many heads: null, interval, count and evidence are here for roles that are played, or not at all. ") +
    (pooled ? `The text is long: each of the ${look.cells.length} cells stands for several tokens, summed over keys, averaged over queries.` : "");
}

function showHead(head) {
  byId("head-title").textContent = `Layer ${head.layer}, head ${head.head}`;
  const parts = new Set(heads.map((h) => h.part)).size > 1 ? ` \u00b7 ${plainText(head.part, 30)}` : "";
  byId("module").textContent = plainText(head.module, 80) + (head.call ? ` (call ${head.call})` : "") + parts;
  const own = look.statistics.map((s, i) => ({ ...s, value: head.values[i] })).filter((s) => s.role === null && s.value !== null);
  byId("numbers").replaceChildren(
    ...own.map((s) => el("div", { title: plainText(s.meaning, 300) }, el("dt", {}, plainText(s.label, 30)), el("dd", {}, number(s.value, s.digits), ...(s.unit ? [el("small", {}, ` ${s.unit}`)] : [])))),
  );
  byId("badges").replaceChildren(...(head.roles.length ? badges(head) : [el("span", { className: "hint" }, "has none of the measured roles")]));
  byId("previous").disabled = head.index === 0;
  byId("next").disabled = head.index === heads.length - 1;
  byId("weigh-why").textContent = head.moves ? "" : "of this head it is not known what its weights move";
  markTile(head);
  markRow(head);
  markDot(head);
  state.query = tellingQuery(head);
  drawPane(head);
  drawOffsets(head);
  tint(state.query);
}

// Every map that is in sight, once more.
function drawMaps() {
  heads.forEach((head, i) => tiles[i].canvas?.dataset.shade && drawTile(head));
  drawGrid();
  drawPane(heads[state.head]);
}

// Shows the weights, or what they move, in maps, arcs and the text.
function chooseWeigh(weigh) {
  state.weigh = weigh;
  for (const one of ["weight", "moved"]) byId(`weigh-${one}`).setAttribute("aria-pressed", String(one === weigh));
  drawMaps();
  tint(state.query);
}

function listen() {
  on("head", showHead);
  on("filter", () => {
    filterGrid();
    fillTable();
    filterDots();
  });
  on("query", (query) => {
    const head = heads[state.head];
    if (state.pane === "map") pointAt(query, state.key);
    else if (state.pane === "arcs") {
      const source = tokenWeights(head);
      if (source && head.rows === source.queries) showSentence(query, source);
      drawArcs(head);
    } else if (state.pane === "sum") drawSum(head);
    else if (state.pane === "picture") drawPicture(head);
    tint(query);
  });
  on("preview", (query) => tint(query ?? state.query));
  byId("previous").addEventListener("click", () => stepHead(-1));
  byId("next").addEventListener("click", () => stepHead(1));
  byId("shade").addEventListener("change", (event) => {
    state.shade = event.target.value;
    drawMaps();
  });
  for (const weigh of ["weight", "moved"]) byId(`weigh-${weigh}`).addEventListener("click", () => chooseWeigh(weigh));
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's bars come and go
    width = window.innerWidth;
    sizeGrid();
    drawChart();
    drawPane(heads[state.head]);
    drawOffsets(heads[state.head]);
  });
}

// The address names the head that is open, as report.html#3.5: it can be sent, and kept.
let addressed = 0;

function toAddress(head) {
  clearTimeout(addressed); // a key that is held down passes many heads, and browsers count the changes
  addressed = setTimeout(() => history.replaceState(null, "", `#${head.name}`), 200);
}

function fromAddress() {
  return heads.findIndex((head) => `#${head.name}` === location.hash);
}

// The head that is open at first: the best-known role of any head, at its strongest.
function firstHead() {
  for (const name of ["induction", "right neighbour", "upper neighbour", "same row", "patch sink", "previous-token", "next-token"]) {
    const role = look.roles.findIndex((r) => r.label === name);
    const score = (head) => head.roles.find((r) => r.role === role)?.value ?? 0;
    const best = role < 0 ? null : heads.reduce((a, b) => (score(b) > score(a) ? b : a));
    if (best && score(best)) return best.index;
  }
  return 0;
}

function say(message) {
  byId("notice").hidden = false;
  byId("notice").textContent = message;
}

async function main() {
  fillHeader();
  if (!look.heads.head.length) return say("This look holds no heads.");
  if (!globalThis.DecompressionStream) return say("This browser is too old to unpack the maps: open the report in one of 2023 or later.");
  if (!CSS.supports("color", "light-dark(red, red)")) say("This browser is too old for the colours of this report: open it in one of 2024 or later.");
  await loadNumbers();
  await loadMaps();
  await loadVectors();
  fillAbout();
  buildRoles();
  buildGrid();
  buildControls();
  buildStatistics();
  buildTokens();
  buildSearch();
  buildTable();
  buildMap();
  buildArcs();
  buildSum();
  buildPicture();
  buildPanes();
  buildKeys();
  byId("weigh").hidden = kept.moved.codes === null;
  for (const id of ["overview", "detail", "running", "charts", "all", "about", "controls"]) byId(id).hidden = false;
  byId("running").hidden = !look.cells.length;
  sizeGrid();
  drawGrid();
  listen();
  drawChart();
  emit("filter");
  const named = fromAddress();
  const first = named < 0 ? firstHead() : named;
  choosePane(onPicture(heads[first]) ? "picture" : "map");
  selectHead(first);
  on("head", toAddress);
  window.addEventListener("hashchange", () => selectHead(fromAddress()));
  document.documentElement.dataset.ready = "true";
}

main().catch((error) => say(`The report could not be drawn: ${error.message}`));
