// Puts it together.

function fillHeader() {
  document.title = `${plainText(look.model, 80)} \u00b7 headwise`;
  appendText(byId("model"), look.model);
  const shape = `${plural(look.layers, "layer")} \u00d7 ${plural(look.width, "head")}`;
  const facts = [shape, plainText(look.kind, 40), plural(look.length, "token"), `looked at in ${number(look.seconds, 1)} s`, `headwise ${plainText(look.version, 40)}`];
  byId("facts").replaceChildren(...facts.map((fact) => el("span", {}, fact)));
}

function fillAbout() {
  for (const s of look.statistics) if (s.role === null) byId("definitions").append(el("dt", {}, s.label), el("dd", {}, s.meaning));
  look.roles.forEach((role, i) => {
    const term = el("dt", {}, el("i"), plainText(role.label, 60));
    term.style.setProperty("--role", roleColour(i));
    const parts = [role.formula, role.source].filter(Boolean).map((part) => plainText(part, 500));
    byId("sources").append(term, ...parts.map((part) => el("dd", {}, part)));
  });
  const pooled = look.cells.some((cell) => cell.count > 1);
  byId("precision").textContent =
    `Weights in the maps are kept in ${LEVELS} steps of their square root: 0.5 means 0.5 \u00b1 ${number(errorAt(0.5), 3)}. ` +
    "The numbers come from the full weights. Bare cells could not be attended. " +
    (pooled ? `The text is long: each of the ${look.cells.length} cells stands for several tokens, summed over keys, averaged over queries.` : "");
}

// One role of the open head, spelt out: score against threshold, definition, source.
function played({ role, value, threshold, chance }) {
  const { label, formula, source } = look.roles[role];
  const item = el("li", {}, el("i"), el("b", {}, plainText(label, 60)), ` ${number(value, 3)} (threshold ${number(threshold, 2)}, chance ${number(chance, 2)}) `);
  item.append([formula, source].filter(Boolean).map((part) => plainText(part, 500)).join(" \u2014 "));
  item.style.setProperty("--role", roleColour(role));
  return item;
}

function showHead(head) {
  byId("head-title").textContent = `Layer ${head.layer}, head ${head.head}`;
  byId("module").textContent = plainText(head.module, 80) + (head.call ? ` (call ${head.call})` : "");
  const numbers = look.statistics.map((s, i) => ({ ...s, value: head.values[i] })).filter((s) => s.value !== null);
  byId("numbers").replaceChildren(
    ...numbers.map((s) => el("div", { title: plainText(s.meaning, 300) }, el("dt", {}, plainText(s.label, 30)), el("dd", {}, number(s.value, s.digits)))),
  );
  const none = el("li", {}, "Plays none of the roles looked for.");
  byId("played").replaceChildren(...(head.roles.length ? head.roles.map(played) : [none]));
  byId("previous").disabled = head.index === 0;
  byId("next").disabled = head.index === heads.length - 1;
  markTile(head);
  for (const row of byId("table").tBodies[0].rows) row.classList.toggle("now", Number(row.dataset.head) === head.index);
  state.query = tellingQuery(head);
  drawChart();
  drawLarge(head);
  drawOffsets(head);
  tint(state.query);
}

function listen() {
  on("head", showHead);
  on("filter", () => {
    filterGrid();
    fillTable();
    drawChart();
  });
  on("query", (query) => {
    pointAt(query, null);
    tint(query);
  });
  on("preview", (query) => tint(query ?? state.query));
  byId("previous").addEventListener("click", () => selectHead(state.head - 1));
  byId("next").addEventListener("click", () => selectHead(state.head + 1));
  byId("shade").addEventListener("change", (event) => {
    state.shade = event.target.value;
    legend(byId("legend"));
    drawGrid();
    drawLarge(heads[state.head]);
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's bars come and go
    width = window.innerWidth;
    drawChart();
    drawLarge(heads[state.head]);
    drawOffsets(heads[state.head]);
  });
}

// The head that is open at first: the best-known role of any head, at its strongest.
function firstHead() {
  for (const name of ["induction", "previous-token", "next-token"]) {
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
  await loadNumbers();
  await loadMaps();
  fillAbout();
  buildRoles();
  buildGrid();
  buildStatistics();
  buildTokens();
  buildTable();
  buildMap();
  for (const id of ["overview", "detail", "running", "charts", "all", "about"]) byId(id).hidden = false;
  legend(byId("legend"));
  drawGrid();
  listen();
  emit("filter");
  selectHead(firstHead());
  document.documentElement.dataset.ready = "true";
}

main().catch((error) => say(`The report could not be drawn: ${error.message}`));
