// One state for the whole page, its history, and its place in the address.

const MAX_TEXT = 1000; // characters of a text that the address carries
const SWITCHES = { causal: "mask", rotary: "positions", scaled: "scale", onePattern: "patterns" };
const PLAIN = { causal: true, rotary: true, scaled: true, onePattern: false };

const state = { text: "", layer: 0, head: 0, query: 0, off: [], kv: 0, ...PLAIN };
let model = null;
let words = null;
const past = [];

const heads = () => range(model.L * model.H, (n) => [Math.floor(n / model.H), n % model.H]);
const nameOfHead = (layer, head) => `${layer}.${head}`;
const placeOf = (name) => name.split(".").map(Number); // [layer, head]
const isOff = (layer, head) => Boolean(state.off[layer]?.[head]);
const namesOff = () => heads().filter((head) => isOff(...head)).map((head) => nameOfHead(...head));
const noneOff = () => range(model.L, () => Array(model.H).fill(false));
const optionsNow = () => ({ causal: state.causal, rotary: state.rotary, scaled: state.scaled, onePattern: state.onePattern, kv: state.kv });
const plainOptions = () => ({ ...PLAIN, kv: model.K });

function snapshot() {
  return { ...state, off: state.off.map((row) => [...row]) };
}

// Changes the state, keeps what was before, and runs the model.
function change(patch, { keep = true } = {}) {
  if (keep) {
    past.push(snapshot());
    if (past.length > 200) past.shift();
  }
  Object.assign(state, patch);
  emit("change");
}

// Looking at another head or token changes nothing that is computed.
function lookAt(patch) {
  Object.assign(state, patch);
  state.query = Math.min(Math.max(state.query, 0), Math.max((current?.ids.length ?? 1) - 1, 0));
  emit("look");
}

function setOff(list, off = true) {
  const next = state.off.map((row) => [...row]);
  for (const [layer, head] of list) next[layer][head] = off;
  change({ off: next });
}

function toggleHead(layer, head) {
  setOff([[layer, head]], !isOff(layer, head));
}

function undo() {
  const before = past.pop();
  if (!before) return;
  Object.assign(state, before);
  emit("change");
}

function reset() {
  change({ off: noneOff(), kv: model.K, ...PLAIN });
}

// What differs from the untouched model, in words.
function changes() {
  const list = namesOff().map((name) => `head ${name} off`);
  if (state.kv !== model.K) list.push(WORDS.keyValueHeads(state.kv));
  for (const [name, word] of Object.entries(SWITCHES)) if (state[name] !== PLAIN[name]) list.push(WORDS.switched[word]);
  return list;
}

function writeAddress() {
  const parts = new URLSearchParams();
  if (state.text !== chapter.text && state.text.length <= MAX_TEXT) parts.set("t", state.text);
  parts.set("at", nameOfHead(state.layer, state.head));
  if (state.query) parts.set("q", String(state.query));
  const off = namesOff();
  if (off.length) parts.set("off", off.join(","));
  if (state.kv !== model.K) parts.set("kv", String(state.kv));
  const switched = Object.entries(SWITCHES).filter(([name]) => state[name] !== PLAIN[name]).map(([, word]) => word);
  if (switched.length) parts.set("no", switched.join(","));
  const address = `#${parts}`;
  try {
    if (location.hash !== address) history.replaceState(null, "", address);
  } catch {
    // a browser may limit how often an address changes, or forbid it in a frame; the page works without
  }
}

// Reads the address with limits; what is odd is left out, and said once. Gives whether all of it was understood.
function readAddress() {
  const hash = location.hash.slice(1);
  if (!hash || !hash.includes("=")) return true; // nothing, or the name of a section
  let clean = hash.length < 20_000;
  const parts = new URLSearchParams(clean ? hash : "");
  const inRange = (text, size) => /^\d{1,4}$/.test(text) && Number(text) < size;
  const headOf = (text) => {
    const [layer, head, more] = text.split(".");
    if (more === undefined && inRange(layer ?? "", model.L) && inRange(head ?? "", model.H)) return [Number(layer), Number(head)];
    clean = false;
    return null;
  };
  const known = new Set(["t", "at", "q", "off", "kv", "no"]);
  for (const key of parts.keys()) clean &&= known.has(key);
  const text = parts.get("t");
  if (text !== null && [...text].length <= MAX_TEXT) state.text = text;
  else if (text !== null) clean = false;
  const at = parts.has("at") ? headOf(parts.get("at")) : null;
  if (at) [state.layer, state.head] = at;
  if (parts.has("q")) inRange(parts.get("q"), LONGEST) ? (state.query = Number(parts.get("q"))) : (clean = false);
  state.off = noneOff();
  for (const name of (parts.get("off") ?? "").split(",").filter(Boolean).slice(0, model.L * model.H)) {
    const head = headOf(name);
    if (head) state.off[head[0]][head[1]] = true;
  }
  if (parts.has("kv")) model.sharings().includes(Number(parts.get("kv"))) ? (state.kv = Number(parts.get("kv"))) : (clean = false);
  for (const word of (parts.get("no") ?? "").split(",").filter(Boolean)) {
    const name = Object.keys(SWITCHES).find((one) => SWITCHES[one] === word);
    if (name) state[name] = !PLAIN[name];
    else clean = false;
  }
  return clean;
}

// --- running ---------------------------------------------------------------------------------------------------------

let current = null; // the latest run: { ids, pieces, plain, now }; both as `Session.run` gives them
let [plainSession, session] = [null, null];

// Gives whether the run was the latest when it ended.
async function runNow() {
  const all = words.ids(state.text);
  const ids = all.slice(0, Math.min(LONGEST, model.positions));
  if (!ids.length) ids.push(chapter.config.bos_token_id ?? 0);
  const plain = await plainSession.run({ ids, options: plainOptions(), off: noneOff() });
  const touched = plain && changes().length;
  const now = touched ? await session.run({ ids, options: optionsNow(), off: state.off }, plainSession) : plain;
  if (!plain || !now) return false; // a newer change has come
  current = { ids, pieces: plain === current?.plain ? current.pieces : ids.map((id) => words.piece(id)), left: all.length - ids.length, plain, now };
  state.query = Math.min(state.query, ids.length - 1);
  emit("run", current);
  return true;
}
