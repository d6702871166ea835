// A claim: a statement of the texts, its verdict, and a number that the page computes on the reader's text. The number is
// computed when its section comes into view; until then the chapter shows that of the default text.

const measures = new Map(); // id -> async (run) => text
const measured = new Map(); // id -> { text, key }

function claim(id, measure) {
  measures.set(id, measure);
}

const outputOf = (id) => document.querySelector(`[data-claim="${id}"] output`);

// Computes the claims of a section, one after the other; gives up where the text has changed meanwhile.
async function measureSection(id, run) {
  const key = `${chapter.name}|${run.ids.join()}`;
  for (const { id: name } of chapter.claims.filter(({ section }) => section === id)) {
    const measure = measures.get(name);
    if (!measure || measured.get(name)?.key === key) continue;
    let text;
    try {
      text = await measure(run);
    } catch (error) {
      text = `not on this text (${error.message})`;
    }
    if (current.plain !== run) return;
    measured.set(name, { text, key });
    const output = outputOf(name);
    if (output) output.textContent = text;
    output?.closest(".claim").classList.add("measured");
    emit("measured", name);
    await rest();
  }
}

// --- sections --------------------------------------------------------------------------------------------------------

const sections = new Map(); // id -> { draw, stale, seen }

// `build()` once, when the model is ready; `draw(run)` after every run, once the section is near the view; `look()` when
// only the head or token looked at has changed.
function section(id, parts) {
  sections.set(id, { id, stale: true, near: false, ...parts });
}

// Where a link or a key leads. Figures that are drawn on the way move it, so it is brought into place once more.
let goal = null;
function goTo(node) {
  goal = node;
  arrive();
}

function arrive() {
  if (!goal) return;
  const before = goal.getBoundingClientRect().top;
  goal.scrollIntoView({ block: "start", behavior: "instant" });
  const part = sections.get(goal.closest("section")?.id);
  if (!part || (part.near && part.stale === false && Math.abs(goal.getBoundingClientRect().top - before) < 1)) goal = null;
}
for (const moved of ["wheel", "touchmove", "pointerdown", "keydown"]) window.addEventListener(moved, ({ key }) => key === "j" || key === "k" || (goal = null), { passive: true, capture: true });

let refreshing = null;
async function refresh() {
  if (refreshing) return refreshing;
  refreshing = (async () => {
    for (let again = true; again; ) {
      again = false;
      for (const part of sections.values()) {
        if (!part.near || !current) continue;
        const run = current;
        if (part.stale !== false) {
          part.stale = false;
          part.draw?.(run);
          arrive();
          await rest();
          again = true;
        }
        if (part.done !== run.plain) {
          part.done = run.plain;
          await measureSection(part.id, run.plain);
          again = true;
        }
      }
    }
  })();
  await refreshing;
  refreshing = null;
  arrive();
  document.documentElement.dataset.settled = String(Number(document.documentElement.dataset.settled ?? 0) + 1);
}

function watchSections() {
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const part = sections.get(target.id);
      if (part) part.near = isIntersecting;
    }
    refresh();
  }, { rootMargin: "60% 0px" });
  for (const id of sections.keys()) observer.observe(byId(id));
  const all = () => {
    for (const part of sections.values()) part.near = true;
    return refresh();
  };
  window.addEventListener("beforeprint", all);
  return all;
}
