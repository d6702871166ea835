// The look, as the page holds it. Strings in it are hostile: they reach the document as text nodes, or as attribute
// values that only CSS attr() reads, and in no other way.

const look = JSON.parse(document.getElementById("look").textContent);
look.statistics = look.numbers.statistics;
look.roles = look.numbers.roles;
const FIRST_SCORE = look.numbers.own;

const heads = []; // filled once the numbers are unpacked

// One object a head. `values` run parallel to look.statistics; `roles` holds those it plays, its own
// role first, states (sinks, broad) last; `main` is that role, null where it plays none but states.
async function loadNumbers() {
  const numbers = JSON.parse(new TextDecoder().decode(await inflate(look.numbers.data)));
  look.heads.place.forEach((place, index) => {
    const at = look.places[place];
    const head = { index, ...at, head: look.heads.head[index], name: `${at.layer}.${look.heads.head[index]}` };
    head.rows = look.maps.rows[index];
    head.columns = look.maps.columns[index];
    head.sides = [sideOf(head.rows, at.queries, at.over[0]), sideOf(head.columns, at.keys, at.over[1])];
    head.values = numbers.values.map((column) => column[index]);
    head.offsets = numbers.offsets[index];
    head.ahead = numbers.ahead[index];
    head.roles = numbers.roles[index].map((role, n) => ({
      ...scoreOf(numbers, role, index),
      evidence: numbers.evidence[index][n],
      detail: numbers.details[index][n],
    }));
    head.main = head.roles.find(({ role }) => !look.roles[role].mark) ?? null;
    head.marks = [...new Set(head.roles.map(({ role }) => look.roles[role].mark).filter(Boolean))];
    head.scores = look.roles.map((_, role) => scoreOf(numbers, role, index)).filter((score) => score.value !== null);
    heads.push(head);
  });
}

function scoreOf(numbers, role, index) {
  const value = numbers.values[FIRST_SCORE + role][index];
  const [chance, low, high, count] = ["nulls", "lows", "highs", "counts"].map((name) => numbers[name][role][index]);
  return { role, value, chance, low, high, count, threshold: look.roles[role].threshold };
}

// What is chosen now; whoever shows it listens.
const state = {
  head: 0,
  query: 0, // a row of the open map
  key: null, // a column of it; null stands for the strongest
  role: null, // the chosen chip; the number of roles stands for "no role or state"
  search: "",
  show: "role",
  order: "head",
  pane: "map",
  shade: "root",
  weigh: "weight", // or what the weights move
  statistic: 0,
};
const listeners = {};

function on(event, listener) {
  (listeners[event] ??= []).push(listener);
}

function emit(event, value) {
  for (const listener of listeners[event] ?? []) listener(value);
}

// One colour a role, from Okabe and Ito's palette for all kinds of colour vision; the name always stands beside it.
function roleColour(role) {
  return role === undefined || role === null ? "var(--none)" : `var(--role-${look.roles[role].colour})`;
}

// The letter of a role; a state is a mark.
function signOf(role) {
  const { mark, letter } = look.roles[role];
  return { dot: "\u25cf", ring: "\u25cb" }[mark] ?? letter;
}

// What is written upon that colour.
function roleInk(role) {
  return role === undefined || role === null ? "var(--ink)" : `var(--on-${look.roles[role].colour})`;
}

function rolesText(head) {
  return head.roles.map(({ role, value }) => `${look.roles[role].label} ${number(value, 2)}`).join(", ");
}

function matches(head) {
  if (state.role === null) return true;
  if (state.role === look.roles.length) return !head.roles.length;
  return head.roles.some(({ role }) => role === state.role);
}

function selectHead(index) {
  if (index < 0 || index >= heads.length) return;
  state.head = index;
  state.query = Math.min(state.query, heads[index].rows - 1);
  state.key = null;
  emit("head", heads[index]);
}

function selectQuery(query, key = null) {
  state.query = query;
  state.key = key;
  emit("query", query);
}
