// Reads the weights, builds the sections, and runs.

const wasmBytes = () => (location.hash.includes("engine=js") || startsPlain ? null : Uint8Array.from(atob(chapter.wasm), (c) => c.charCodeAt(0)));
const startsPlain = location.hash === "#engine=js";

let drawAll = null;

// A model is ready: the first, or one that the reader has opened.
function start(opened, read) {
  [model, words] = [opened, read];
  [plainSession, session] = [new Session(model), new Session(model)];
  past.length = 0;
  measured.clear();
  lossesKnown.clear();
  current = null;
  Object.assign(state, { layer: 0, head: 0, query: 0, off: noneOff(), kv: model.K, ...PLAIN });
  document.documentElement.dataset.engine = model.memory.engine;
  document.documentElement.dataset.packaged = String(chapter.packaged);
  byId("notice").hidden = true;
  if (model.memory.engine === "js" && !startsPlain) notice(WORDS.plainEngine);
  for (const part of sections.values()) {
    part.build?.();
    Object.assign(part, { stale: true, done: null });
  }
  emit("change");
}

function notice(text) {
  say("notice", text);
  byId("notice").hidden = false;
}

// Beside the text where there is room, folded above it where there is none.
function showContents() {
  const wide = window.matchMedia("(min-width: 79rem)");
  const fit = () => (byId("contents").firstElementChild.open = wide.matches);
  wide.addEventListener("change", fit);
  fit();
}

let asked = 0;
on("change", () => work(CHANGE, async () => {
  const mine = ++asked;
  await rest(); // several changes of one moment are run once
  if (mine !== asked || !(await runNow())) return;
  for (const part of sections.values()) part.stale = true;
  await shown(); // the bar has the new loss; the figures take longer
}).then(refresh));
on("look", () => {
  if (!current) return;
  for (const part of sections.values()) if (part.look) part.stale ||= LOOK;
  refresh();
});

async function begin() {
  const asked = byId(location.hash.slice(1)); // before the address becomes that of the experiment
  try {
    const weights = await inflate(byId("weights").textContent);
    const opened = await Model.of(chapter.config, packedTensors(chapter.tensors, weights), wasmBytes());
    const [tokenizer, config] = JSON.parse(byId("tokenizer").textContent);
    state.text = chapter.text;
    buildBar();
    start(opened, new Words(tokenizer, config));
    if (chapter.packaged) Object.assign(state, { layer: 2, head: 1 });
    state.query = Math.floor(LONGEST / 3);
    if (!startsPlain && !readAddress()) notice(WORDS.oddAddress);
    if (byId("text").value !== state.text) byId("text").value = state.text;
    drawAll = watchSections();
    readKeys();
    showContents();
    if (asked) goTo(asked);
    const first = new Promise((go) => (listeners.run ??= []).push(go));
    await first;
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    notice(WORDS.failed + error.message);
    throw error;
  }
}

// For the console, and for the tests: the parts of the engine, nothing that could change the page.
window.headwise = Object.freeze({
  counts, randomTwice,
  ids: (text) => words.ids(text),
  forward: (ids, options, more) => model.forward(ids, { ...plainOptions(), ...options }, more),
  model: () => model,
  state: () => ({ ...snapshot(), changes: changes() }),
  drawAll: (claims) => drawAll(claims),
  refresh: () => refresh(),
});

begin();
