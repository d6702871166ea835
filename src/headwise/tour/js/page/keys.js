// Keys that work everywhere but where text is typed.

function readKeys() {
  const help = byId("keys");
  byId("keys-open").addEventListener("click", () => help.showModal());
  byId("keys-close").addEventListener("click", () => help.close());
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    if (link) goTo(byId(link.getAttribute("href").slice(1)));
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("textarea, input, select");
    if (typing || help.open || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      j: () => toSection(1), k: () => toSection(-1), u: undo, r: reset, t: nextTheme, "?": () => help.showModal(),
      x: () => toggleHead(state.layer, state.head), "[": () => stepHead(-1), "]": () => stepHead(1),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function toSection(step) {
  const all = [...document.querySelectorAll("main > section")];
  const edge = byId("bar").getBoundingClientRect().bottom + 40;
  const here = goal ? all.indexOf(goal) : all.findLastIndex((node) => node.getBoundingClientRect().top <= edge);
  const next = all[Math.min(Math.max(here + step, 0), all.length - 1)];
  goTo(next);
  next.querySelector("h2").focus({ preventScroll: true });
}

function stepHead(step) {
  const place = (state.layer * model.H + state.head + step + model.L * model.H) % (model.L * model.H);
  lookAt({ layer: Math.floor(place / model.H), head: place % model.H });
  tell(`Head ${nameOfHead(state.layer, state.head)}`);
}

const THEMES = { "": "as the system", light: "light", dark: "dark" };
function nextTheme() {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  tell(`Colours: ${THEMES[next]}`);
}
