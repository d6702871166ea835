// Keys that work everywhere, the help that lists them, light and dark.

const PANES = ["map", "arcs", "sum", "evidence", "picture"];
const THEMES = { auto: "as the system", light: "light", dark: "dark" };

function choosePane(name, focus = false) {
  state.pane = name;
  if (name === "arcs" && arcs.token === null) toSentence(heads[state.head]);
  for (const pane of PANES) {
    byId(`pane-${pane}`).hidden = pane !== name;
    byId(`tab-${pane}`).setAttribute("aria-selected", String(pane === name));
    byId(`tab-${pane}`).tabIndex = pane === name ? 0 : -1;
  }
  if (focus) byId(`tab-${name}`).focus();
  drawPane(heads[state.head]);
}

function drawPane(head) {
  const draw = { map: drawLarge, arcs: drawArcs, sum: drawSum, evidence: drawEvidence, picture: drawPicture }[state.pane];
  draw(head);
}

function focusPane() {
  const target = { map: "map", arcs: "arcs", sum: "sum", evidence: "pane-evidence", picture: "scene" }[state.pane];
  byId(target).focus();
}

function buildPanes() {
  for (const pane of PANES) byId(`tab-${pane}`).addEventListener("click", () => choosePane(pane));
  byId("tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const panes = PANES.filter((pane) => !byId(`tab-${pane}`).hidden);
    choosePane(panes[(panes.indexOf(state.pane) + step + panes.length) % panes.length], true);
  });
  byId("arcs").addEventListener("keydown", moveInArcs);
  byId("sum").addEventListener("keydown", moveInSum);
}

// The next head among those that the filter shows.
function stepHead(step) {
  let at = state.head + step;
  while (heads[at] && !matches(heads[at])) at += step;
  if (heads[at]) selectHead(at);
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % names.length]);
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = { auto: "\u25d0", light: "\u2600", dark: "\u263e" }[name];
  byId("theme").title = `Colours: ${THEMES[name]} (key t)`;
}

function leave() {
  if (state.search) {
    byId("search").value = "";
    search("");
  } else if (state.role !== null) {
    state.role = null;
    emit("filter");
  }
  tiles[state.head].button.focus();
}

const KEYS = {
  "?": () => byId("help").showModal(),
  "/": () => byId("search").focus(),
  "[": () => stepHead(-1),
  "]": () => stepHead(1),
  t: nextTheme,
  w: () => byId("weigh").hidden || chooseWeigh(state.weigh === "weight" ? "moved" : "weight"),
  Escape: leave,
};
PANES.forEach((pane, i) => (KEYS[String(i + 1)] = () => byId(`tab-${pane}`).hidden || choosePane(pane)));

function buildKeys() {
  setTheme("auto");
  byId("theme").addEventListener("click", nextTheme);
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  byId("help-close").addEventListener("click", () => byId("help").close());
  byId("help").addEventListener("click", (event) => event.target === byId("help") && byId("help").close());
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (byId("help").open || event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing && event.key !== "Escape") return;
    const action = Object.hasOwn(KEYS, event.key) ? KEYS[event.key] : null;
    if (!action) return;
    event.preventDefault();
    action();
  });
}
