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
    await later(CLAIM);
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
  }
}

// --- sections --------------------------------------------------------------------------------------------------------

const LOOK = "look"; // only the head or the token looked at has changed
const sections = new Map(); // id -> { draw, look, stale: true, LOOK or false; seen: in view; near: or close to it }

// `build()` once, when the model is ready; `draw(run)` after every run, once the section is near the view; `look()` when
// only the head or token looked at has changed, and for all where there is no `draw`. A drawing that computes gives a promise.
function section(id, parts) {
  sections.set(id, { id, stale: true, seen: false, near: false, draw: parts.look, ...parts });
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

// Figures are drawn one at a time: first what is in view, then what is near it; the claims follow, where nothing is drawn.
const slow = new Set(); // figures that compute before they are drawn
let [showing, measuring] = [null, null];

function nextOf(wanted) {
  const parts = [...sections.values()].filter((part) => current && part.near && wanted(part));
  return parts.find(({ seen }) => seen) ?? parts[0];
}

// Draws one figure; gives whether there was one to draw.
function drawNext() {
  const part = nextOf(({ stale }) => stale);
  if (!part) return false;
  const act = part.stale === LOOK ? "look" : "draw";
  part.stale = false;
  if (!part[act]) return true;
  const key = `${part.id} ${act}`;
  counts.draws[key] = (counts.draws[key] ?? 0) + 1;
  const drawn = part[act](current);
  if (drawn) waitFor(drawn);
  arrive();
  return true;
}

async function drawStale() {
  do await later(FIGURE);
  while (drawNext());
  if (current) writeAddress(); // a browser takes some milliseconds for it
}

function waitFor(drawn) {
  const whole = work(FIGURE, () => drawn).finally(() => slow.delete(whole));
  slow.add(whole);
}

async function measureNear() {
  await later(CLAIM);
  for (let part; (part = nextOf(({ done }) => done !== current.plain)); ) {
    const run = current.plain;
    await measureSection(part.id, run);
    if (run === current.plain) part.done = run;
  }
}

// Resolves when all that is near is drawn and, with `claims`, measured.
async function refresh(claims = true) {
  showing ??= work(FIGURE, drawStale).finally(() => (showing = null));
  measuring ??= measureNear().finally(() => (measuring = null));
  await Promise.all([showing, claims && measuring]);
  await Promise.all(slow);
  arrive();
  document.documentElement.dataset.settled = String(Number(document.documentElement.dataset.settled ?? 0) + 1);
}

function watchSections() {
  const observe = (mark, rootMargin) => {
    const observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const part = sections.get(target.id);
        if (part) part[mark] = isIntersecting;
      }
      refresh();
    }, { rootMargin });
    for (const id of sections.keys()) observer.observe(byId(id));
  };
  observe("seen", "0px");
  observe("near", "60% 0px");
  const all = (claims) => {
    for (const part of sections.values()) part.near = true;
    return refresh(claims);
  };
  window.addEventListener("beforeprint", () => {
    all();
    while (drawNext()); // what is printed is taken when this returns
  });
  return all;
}
